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
 * reply. Errors and notes appear in the notice of the panel.
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
        if (!reply.error) show(reply);
      } catch {
        notify("No response from the server; check that foveate demo is still running");
      }
    }
    busy = false;
  }

  return { request, notify };
}

/** Make the button for more examples of a panel replace those that are shown. */
export function offerExamples(panel) {
  const { request } = connect(panel), picks = panel.querySelector(".picks");
  let turn = 0;
  panel.querySelector(".more").addEventListener("click", () => {
    const fields = { turn: ++turn };
    request("samples", () => fields, (reply) => { picks.innerHTML = reply.html; });
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
