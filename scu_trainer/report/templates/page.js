"use strict";
(() => {
  // A page in a sandboxed frame, as artifact viewers show it, may keep nothing; all else works there too.
  const storage = (name) => { try { return window[name]; } catch { return null; } };
  const session = storage("sessionStorage"), local = storage("localStorage");

  const place = "scu-report-scroll:" + location.pathname, kept = session?.getItem(place) ?? null;
  if (kept !== null) { session.removeItem(place); scrollTo(0, Number(kept)); }
  const seconds = Number(document.body.dataset.reloadS);
  const again = () => { session?.setItem(place, String(scrollY)); location.reload(); };
  if (seconds > 0) setTimeout(again, 1000 * seconds);

  const root = document.documentElement, button = document.getElementById("theme"), order = ["auto", "light", "dark"];
  const show = (theme) => {
    if (theme === "auto") delete root.dataset.theme; else root.dataset.theme = theme;
    button.textContent = "theme: " + theme;
  };
  let theme = local?.getItem("scu-report-theme");
  if (!order.includes(theme)) theme = "auto";
  show(theme);
  button.addEventListener("click", () => {
    theme = order[(order.indexOf(theme) + 1) % order.length];
    local?.setItem("scu-report-theme", theme);
    show(theme);
  });
})();
