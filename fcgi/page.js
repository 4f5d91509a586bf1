"use strict";
// The numbers are put in place as the server has written them; without this script a reload shows them as well.
const place = document.getElementById("numbers"), state = document.getElementById("state");
let failures = 0;
async function look() {
  if (!document.hidden) {
    try {
      const answer = await fetch("numbers", { cache: "no-store" });
      if (!answer.ok) throw new Error("status " + answer.status);
      place.innerHTML = await answer.text();
      failures = 0;
    } catch (trouble) {
      failures += 1;
    }
    state.textContent = failures ? "no answer from the daemon; these numbers are old" : "live";
    state.className = failures ? "bad" : "good";
  }
  setTimeout(look, failures ? 5000 : 2000);
}
setTimeout(look, 1000);
