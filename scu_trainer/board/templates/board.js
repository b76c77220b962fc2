"use strict";
// Refresh the element "live" of a page. Focus, scroll position and open details stay; a pause is remembered for this tab.
(() => {
  for (const button of document.querySelectorAll("button[data-busy]"))
    button.form.addEventListener("submit", () => { button.disabled = true; button.textContent = button.dataset.busy; });

  const live = document.getElementById("live"), pause = document.getElementById("pause");
  if (!live) return;
  let paused = sessionStorage.getItem("scu-board-paused") === "yes";
  const show = () => { pause.textContent = "updates: " + (paused ? "off" : "on"); pause.setAttribute("aria-pressed", String(paused)); };
  pause.addEventListener("click", () => { paused = !paused; sessionStorage.setItem("scu-board-paused", paused ? "yes" : "no"); show(); });
  show();

  const replaceContent = (fresh) => {
    const focused = live.contains(document.activeElement) ? document.activeElement.id : "";
    const open = [...live.querySelectorAll("details[open] > summary")].map((summary) => summary.textContent);
    const log = document.getElementById("log"), top = log ? log.scrollTop : 0;
    live.innerHTML = fresh.innerHTML;
    live.dataset.everyS = fresh.dataset.everyS;
    for (const summary of live.querySelectorAll("details > summary"))
      if (open.includes(summary.textContent)) summary.parentElement.open = true;
    const after = document.getElementById("log");
    if (after) after.scrollTop = top;
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  };
  let seen = "";
  const refresh = async () => {
    try {
      if (!paused && !document.hidden) {
        const answer = await fetch(live.dataset.url || location.href);
        const text = await answer.text();
        const fresh = new DOMParser().parseFromString(text, "text/html").getElementById("live");
        if (fresh && !paused && fresh.innerHTML !== seen) { replaceContent(fresh); seen = fresh.innerHTML; }
      }
    } catch { /* the board has ended, or the run was deleted: keep what was shown last */ }
    setTimeout(refresh, 1000 * Number(live.dataset.everyS));
  };
  setTimeout(refresh, 1000 * Number(live.dataset.everyS));
})();
