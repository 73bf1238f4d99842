// Tab for a scene of several digits.
import { connect } from "./page.js";

const panel = document.getElementById("scene"), form = panel.querySelector("form");
const { count, seed } = form.elements, shown = panel.querySelector(".shown");
const { request } = connect(panel);

const fields = () => ({
  count: Number(count.value), network: Number(form.elements.network?.value), seed: Number(seed.value),
});

function draw() {
  if (form.reportValidity()) request("scene", fields, (reply) => { shown.innerHTML = reply.html; });
}

panel.addEventListener("open", () => { if (!shown.innerHTML) draw(); });
form.addEventListener("change", draw);
count.addEventListener("input", () => { form.querySelector("output").textContent = count.value; });
form.addEventListener("submit", (event) => {
  event.preventDefault();
  seed.value = (Number(seed.value) + 1) % (Number(seed.max) + 1);
  draw();
});
