// Code shared by all pages: tabs, and requests to the server.

/** Send a JSON request. Resolves to the reply, which has `error` if the server rejected it. */
async function post(name, fields) {
  const headers = { "Content-Type": "application/json" };
  const reply = await fetch(name, { method: "POST", headers, body: JSON.stringify(fields) });
  return reply.json();
}

/**
 * Connect a panel to the server. Requests are sent one at a time, and only the latest pending
 * request is kept. `fields` returns the fields of a request when it is sent, and `show` renders the
 * reply. Errors and notes appear in the notice of the panel, whose `data-replies` counts replies.
 */
export function connect(panel) {
  const notice = panel.querySelector(".notice");
  let busy = false, wanted = null;

  function notify(message) {
    notice.textContent = message || "";
    notice.hidden = !message;
  }

  async function request(name, fields, show) {
    wanted = [name, fields, show];
    if (busy) return;
    busy = true;
    while (wanted) {
      const [name, fields, show] = wanted;
      wanted = null;
      try {
        const reply = await post(name, fields());
        notify(reply.error || reply.note);
        if (reply.error) continue;
        show(reply);
        panel.dataset.replies = Number(panel.dataset.replies || 0) + 1;
      } catch {
        notify("No response from the server; check that foveate demo is still running");
      }
    }
    busy = false;
  }

  return { request, notify };
}

/** Pass a file to `take` if it is chosen in an input of the panel or dropped on `target`. */
export function acceptFiles(panel, target, take) {
  for (const input of panel.querySelectorAll(".file input")) {
    input.addEventListener("change", () => {
      if (input.files[0]) take(input.files[0]);
      input.value = "";
    });
  }
  const mark = (on) => target.classList.toggle("dropping", on);
  target.addEventListener("dragover", (event) => {
    event.preventDefault();
    mark(true);
  });
  target.addEventListener("dragleave", () => mark(false));
  target.addEventListener("drop", (event) => {
    event.preventDefault();
    mark(false);
    if (event.dataTransfer.files[0]) take(event.dataTransfer.files[0]);
  });
}

/** Pass the button of a chosen example to `choose`; let a button replace the examples by others. */
export function offerExamples(panel, choose) {
  const { request } = connect(panel), picks = panel.querySelector(".picks");
  let turn = 0;
  panel.querySelector(".more").addEventListener("click", () => {
    const fields = { turn: ++turn };
    request("samples", () => fields, (reply) => { picks.innerHTML = reply.html; });
  });
  picks.addEventListener("click", (event) => {
    const picked = event.target.closest("button");
    if (picked) choose(picked);
  });
}

const tabs = [...document.querySelectorAll("[role=tab]")];

function select(chosen) {
  for (const tab of tabs) {
    const panel = document.getElementById(tab.getAttribute("aria-controls"));
    tab.setAttribute("aria-selected", tab === chosen);
    tab.tabIndex = tab === chosen ? 0 : -1;
    panel.hidden = tab !== chosen;
    if (tab === chosen) panel.dispatchEvent(new Event("open"));
  }
}

tabs.forEach((tab, place) => {
  const targets = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: -1 };
  tab.addEventListener("click", () => select(tab));
  tab.addEventListener("keydown", (event) => {
    if (!(event.key in targets)) return;
    event.preventDefault();
    const next = tabs.at(targets[event.key] % tabs.length);
    next.focus();
    select(next);
  });
});
