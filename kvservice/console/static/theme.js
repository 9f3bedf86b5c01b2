// Chooses the theme before anything is drawn, so that a dark page does not flash white. Loaded in the head.
const THEMES = ["auto", "light", "dark"];

function chosenTheme() {
  try {
    const kept = localStorage.getItem("kvservice-theme");
    return THEMES.includes(kept) ? kept : "auto";
  } catch {
    return "auto"; // storage is switched off
  }
}

function applyTheme(theme) {
  const dark = theme === "dark" || (theme === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  document.dispatchEvent(new Event("themechange"));
}

function chooseTheme(theme) {
  try {
    localStorage.setItem("kvservice-theme", theme);
  } catch {
    // then it lasts as long as the page
  }
  applyTheme(theme);
}

window.kvserviceTheme = { THEMES, chosenTheme, chooseTheme };
applyTheme(chosenTheme());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => applyTheme(chosenTheme()));
