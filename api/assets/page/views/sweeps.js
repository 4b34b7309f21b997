// Sweeps: `#/sweep` is the form that starts one, `#/sweep?like=ID` the same filled in, `#/sweep/ID` its heatmaps.

import { html } from "../lib/ui.js";
import Form from "./sweep_form.js";
import Grid from "./sweep_grid.js";

export default function View({ params, query, session }) {
  const like = (query && query.get("like")) || "";
  return params[0] ? html`<${Grid} key=${params[0]} id=${params[0]} session=${session} />` : html`<${Form} key=${`form ${like}`} like=${like} />`;
}
