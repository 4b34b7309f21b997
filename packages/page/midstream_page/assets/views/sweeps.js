// Sweeps: `#/sweep` is the form that starts one, `#/sweep?like=ID` the same filled in, `#/sweep/ID`
// its heatmaps.

import { html } from "../lib/ui.js";
import Form from "./sweep_form.js";
import Grid from "./sweep_grid.js";

export default function View({ params, query, session, jobs }) {
  const like = (query && query.get("like")) || "";
  return params[0]
    ? html`<${Grid} key=${params[0]} id=${params[0]} session=${session} jobs=${jobs} />`
    : html`<${Form} key=${`form ${like}`} like=${like} />`;
}
