"use strict";
(() => {
  const place = "scu-report-scroll:" + location.pathname, kept = sessionStorage.getItem(place);
  if (kept !== null) { sessionStorage.removeItem(place); scrollTo(0, Number(kept)); }
  const seconds = Number(document.body.dataset.reloadS);
  const again = () => { sessionStorage.setItem(place, String(scrollY)); location.reload(); };
  if (seconds > 0) setTimeout(again, 1000 * seconds);

  const root = document.documentElement, button = document.getElementById("theme"), order = ["auto", "light", "dark"];
  const show = (theme) => {
    if (theme === "auto") delete root.dataset.theme; else root.dataset.theme = theme;
    button.textContent = "theme: " + theme;
  };
  let theme = localStorage.getItem("scu-report-theme");
  if (!order.includes(theme)) theme = "auto";
  show(theme);
  button.addEventListener("click", () => {
    theme = order[(order.indexOf(theme) + 1) % order.length];
    localStorage.setItem("scu-report-theme", theme);
    show(theme);
  });
})();
