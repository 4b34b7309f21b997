// Light or dark: what the system says, unless the reader chose one at the top.

import { useEffect, useState } from "../vendor/preact.js";

const system = matchMedia("(prefers-color-scheme: dark)");

export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : system.matches;
}

/** Calls `listener` after each change; returns what ends that. */
export function onTheme(listener) {
  const watch = new MutationObserver(listener);
  watch.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
  system.addEventListener("change", listener);
  return () => {
    watch.disconnect();
    system.removeEventListener("change", listener);
  };
}

/** Whether it is dark; draws the component again when that changes. */
export function useDark() {
  const [dark, set] = useState(isDark);
  useEffect(() => onTheme(() => set(isDark())), []);
  return dark;
}
