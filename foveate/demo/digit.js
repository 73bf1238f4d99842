// Tab for a single digit: drawing pad, file upload and zoom. The server renders the panels as HTML.
import { acceptFiles, connect, offerExamples } from "./page.js";

const root = document.getElementById("digit");
const find = (what) => root.querySelector(what);
const pad = find(".pad"), ink = pad.getContext("2d");
const slider = find(".zoom input");
const { request, notify } = connect(root);
let digit = root.dataset.digit;
let label = Number(root.dataset.label);
let drawing = false, fresh = true;
let unsent = null;  // sends the drawing, until the server has converted it to a digit

const zoom = () => 2 ** Number(slider.value);
const send = () => request("predict", () => ({ digit, zoom: zoom(), label }), show);
const predict = () => (unsent || send)();

function show(reply) {
  for (const part of ["frame", "cards", "channels", "accuracy"]) {
    find("." + part).innerHTML = reply[part];
  }
}

function use(chosen, known) {
  [digit, label, unsent] = [chosen, known, null];
}

function clear() {
  ink.fillStyle = "#000";
  ink.fillRect(0, 0, pad.width, pad.height);
  fresh = true;
}

function paint(text) {
  const grey = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const side = Math.sqrt(grey.length), small = document.createElement("canvas");
  small.width = small.height = side;
  const pixels = new ImageData(side, side);
  grey.forEach((value, k) => pixels.data.set([value, value, value, 255], 4 * k));
  small.getContext("2d").putImageData(pixels, 0, 0);
  ink.drawImage(small, 0, 0, pad.width, pad.height);
  fresh = true;
}

function place(event) {
  const box = pad.getBoundingClientRect(), factor = pad.width / box.width;
  return [(event.clientX - box.left) * factor, (event.clientY - box.top) * factor];
}

function stroke(event) {
  if (!drawing) return;
  ink.lineTo(...place(event));
  ink.stroke();
  const data = () => pad.toDataURL("image/png").split(",")[1];
  const fields = () => ({ data: data(), name: "The drawing", zoom: zoom() });
  const submit = () => request("upload", fields, (reply) => {
    if (unsent === submit) use(reply.digit, null);
    show(reply);
  });
  unsent = submit;
  submit();
}

pad.addEventListener("pointerdown", (event) => {
  if (event.button) return;  // the menu of the right button swallows the release
  if (fresh) clear();
  fresh = false;
  drawing = true;
  pad.setPointerCapture(event.pointerId);
  Object.assign(ink, { strokeStyle: "#fff", lineWidth: 24, lineCap: "round", lineJoin: "round" });
  ink.beginPath();
  const [x, y] = place(event);
  ink.moveTo(x - 0.1, y);  // a line of zero length would draw nothing
  stroke(event);
});
pad.addEventListener("pointermove", stroke);
for (const end of ["pointerup", "pointercancel"]) {
  pad.addEventListener(end, () => { drawing = false; });
}

function upload(chosen) {
  const limit = Number(root.dataset.bytes);
  if (chosen.size > limit) {
    return notify(`${chosen.name} is larger than ${limit >> 20} MiB; choose a smaller file`);
  }
  const reader = new FileReader();
  reader.onload = () => {
    const data = reader.result.split(",")[1] || "";
    request("upload", () => ({ data, name: chosen.name, zoom: zoom() }), (reply) => {
      use(reply.digit, null);
      paint(digit);
      show(reply);
    });
  };
  reader.readAsDataURL(chosen);
}

acceptFiles(root, pad, upload);
slider.addEventListener("input", () => {
  find(".zoom output").textContent = "× " + zoom().toFixed(2);
  predict();
});
find(".clear").addEventListener("click", () => {
  unsent = null;
  clear();
  notify("");
});
offerExamples(root, (picked) => {
  use(picked.dataset.digit, Number(picked.dataset.label));
  paint(digit);
  predict();
});

clear();
paint(digit);
