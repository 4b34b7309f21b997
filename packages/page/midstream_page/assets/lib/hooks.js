// Hook points by names for people, with the names that requests use second.

import { html } from "./ui.js";

/**
 * Our name → [name for people, TransformerLens' name where it is another]. In the order of a layer's
 * forward pass.
 */
export const HOOKS = {
  pre_attn: ["Residual stream before the layer", "resid_pre"],
  q_proj: ["Queries as projected", "hook_q"],
  k_proj: ["Keys as projected", "hook_k"],
  q: ["Queries as attention uses them", "rot_q"],
  k: ["Keys as attention uses them", "rot_k"],
  v: ["Values", ""],
  z: ["Outputs of the attention heads", ""],
  attn_out: ["Attention output", ""],
  post_attn: ["Residual stream after attention", "resid_mid"],
  mlp_in: ["MLP input", ""],
  router: ["Router logits", ""],
  mlp_act: ["MLP neurons", "mlp_post"],
  mlp_out: ["MLP output", ""],
  post_block: ["Residual stream after the layer", "resid_post"],
};
/** TransformerLens' names without `attn.` and `hook_`, where `HOOKS` does not say it. */
const OTHERS = {
  "mlp.hook_post": "mlp_act",
  resid_pre: "pre_attn",
  resid_mid: "post_attn",
  resid_post: "post_block",
  rot_q: "q",
  rot_k: "k",
  mlp_post: "mlp_act",
  hook_q: "q_proj",
  hook_k: "k_proj",
};

/** Our name of a hook point that a request calls by TransformerLens' name. */
export function ours(name) {
  const part = name.replace(/^attn\./, "");
  return OTHERS[part] || OTHERS[part.replace(/^hook_/, "")] || part.replace(/^hook_/, "");
}

export const hookName = (hook) => (HOOKS[hook] ? HOOKS[hook][0] : hook);
export const hookCode = (hook) =>
  [hook, ...(HOOKS[hook] && HOOKS[hook][1] ? [HOOKS[hook][1]] : [])].join(", ");
/** Both names, as text. */
export const hookTitle = (hook) => (HOOKS[hook] ? `${hookName(hook)} (${hookCode(hook)})` : hook);

/**
 * Check boxes of hook points. `chosen(hook)`; `toggle(hook, on)`; `note(hook)`: what else is to be
 * said of one.
 */
export const HookBoxes = ({ hooks, chosen, toggle, note = () => "" }) => html`
  <div class="hook-boxes">
    ${hooks.map(
      (hook) => html`
        <label key=${hook}>
          <input
            type="checkbox"
            data-hook=${hook}
            checked=${chosen(hook)}
            onChange=${(event) => toggle(hook, event.target.checked)}
          /> <span>${hookName(hook)} <code>${hookCode(hook)}</code>${note(hook)}</span>
        </label>
      `,
    )}
  </div>
`;
