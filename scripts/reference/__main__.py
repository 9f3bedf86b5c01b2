"""Write the pages of docs/reference that come from the code: `make docs-reference`."""

from __future__ import annotations

from scripts.reference.pages import FOLDER, PAGES

if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).parent.mkdir(exist_ok=True)
        (FOLDER / name).write_text(page())
