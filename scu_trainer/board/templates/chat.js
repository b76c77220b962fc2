"use strict";
(() => {
  const form = document.getElementById("chat"), words = document.getElementById("words"), send = document.getElementById("send");
  const talks = { left: [], right: [] };
  const addLine = (side, role, text) => {
    const paragraph = document.createElement("p");
    paragraph.className = role;
    paragraph.textContent = text;
    document.getElementById("talk-" + side).append(paragraph);
    return paragraph;
  };
  const ask = async (side, text) => {
    talks[side].push({ role: "user", content: text });
    addLine(side, "user", text);
    const shown = addLine(side, "assistant", "…"), talk = document.getElementById("talk-" + side);
    try {
      const body = new URLSearchParams({ name: document.getElementById(side).value, messages: JSON.stringify(talks[side]) });
      const answer = await fetch("/chat/answer", { method: "POST", body });
      if (!answer.ok) throw new Error(await answer.text());
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let reply = "";
      for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
        reply += piece.value;
        shown.textContent = reply;
        talk.scrollTop = talk.scrollHeight;
      }
      talks[side].push({ role: "assistant", content: reply });
    } catch (error) {
      shown.className = "trouble";
      shown.textContent = error.message;
      talks[side].pop();
    }
  };
  const forget = (side) => { talks[side].length = 0; document.getElementById("talk-" + side).replaceChildren(); };
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const text = words.value;
    words.value = "";
    send.disabled = true;
    await Promise.all(["left", "right"].map((side) => ask(side, text)));
    send.disabled = false;
    words.focus();
  });
  words.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && words.value.trim() && !send.disabled) { event.preventDefault(); form.requestSubmit(); }
  });
  document.getElementById("again").addEventListener("click", () => { forget("left"); forget("right"); words.focus(); });
  for (const side of ["left", "right"]) document.getElementById(side).addEventListener("change", () => forget(side));
})();
