// Ops: not there yet.

import { html, Empty } from "../lib/ui.js";

export default function View() {
  return html`<h1>Ops</h1><${Empty}>This view is not there yet.<//>`;
}
