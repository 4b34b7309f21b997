// One job: not whole yet.

import { html, useEffect, useRef, Button } from "../lib/ui.js";

export function JobDetails({ id, onClose }) {
  const head = useRef(null);
  useEffect(() => head.current.focus(), []);
  return html`<section class="details" aria-labelledby="job-title" onKeyDown=${(event) => event.key === "Escape" && onClose()}>
    <h2 id="job-title" tabindex="-1" ref=${head}>${id}</h2>
    <${Button} onClick=${onClose}>Close<//>
  </section>`;
}
