// A table of thousands of rows of which only the visible ones are in the document. Rows are reached
// with the arrow keys.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./ui.js";

export const ROW = 54; // pixels; `.rows td` in app.css has the same height
const SPARE = 8; // rows above and below the visible part

/**
 * `columns`: [{name, title, cell(item)}]; `items`: objects with `id`, in order; `onOpen(item)`: Enter
 * or a click on a row. `active`: id of the row that is marked. What stands at the top stays there
 * when rows are added above.
 */
export function Rows({ label, columns, items, active, onOpen }) {
  const box = useRef(null);
  const [view, setView] = useState({ top: 0, height: 600 });
  const [focused, setFocused] = useState(null);
  const wanted = useRef(null); // the row that is to get the focus once it is in the document
  const anchor = useRef({ id: null, offset: 0 });

  const look = () => {
    const top = box.current.scrollTop;
    const index = Math.min(Math.floor(top / ROW), items.length - 1);
    anchor.current =
      top > 0 && index >= 0 ? { id: items[index].id, offset: top - index * ROW } : { id: null, offset: 0 };
    setView({ top, height: box.current.clientHeight });
  };
  useEffect(() => {
    const observer = new ResizeObserver(() => box.current && look());
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  useLayoutEffect(() => {
    const { id, offset } = anchor.current;
    if (id !== null) {
      const index = items.findIndex((item) => item.id === id);
      const top = index * ROW + offset;
      if (index >= 0 && top !== box.current.scrollTop) {
        box.current.scrollTop = top;
        setView((known) => ({ ...known, top }));
      }
    }
  }, [items]);
  useLayoutEffect(() => {
    if (wanted.current === null) return;
    const row = box.current.querySelector(`[data-id="${CSS.escape(wanted.current)}"]`);
    if (row) {
      row.focus({ preventScroll: true });
      wanted.current = null;
    }
  });

  const go = (index) => {
    const to = Math.max(0, Math.min(items.length - 1, index));
    const head = box.current.querySelector("thead").offsetHeight;
    const { scrollTop, clientHeight } = box.current;
    if (to * ROW < scrollTop) box.current.scrollTop = to * ROW;
    else if ((to + 1) * ROW > scrollTop + clientHeight - head)
      box.current.scrollTop = (to + 1) * ROW - clientHeight + head;
    wanted.current = items[to].id;
    setFocused(items[to].id);
    look();
  };
  const keys = (event) => {
    const id = event.target.dataset && event.target.dataset.id;
    if (!id) return; // a button in the row
    const at = items.findIndex((item) => item.id === id);
    const page = Math.max(1, Math.floor(view.height / ROW) - 2);
    const to = {
      ArrowDown: at + 1,
      ArrowUp: at - 1,
      PageDown: at + page,
      PageUp: at - page,
      Home: 0,
      End: items.length - 1,
    }[event.key];
    if (to !== undefined) {
      event.preventDefault();
      go(to);
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      onOpen(items[at]);
    }
  };

  const first = Math.max(0, Math.floor(view.top / ROW) - SPARE);
  const last = Math.min(items.length, Math.ceil((view.top + view.height) / ROW) + SPARE);
  const shown = items.slice(first, last);
  const reachable = shown.some((item) => item.id === focused)
    ? focused
    : shown.length
      ? shown[Math.min(Math.max(0, Math.ceil(view.top / ROW) - first), shown.length - 1)].id
      : null;
  return html`
    <div class="rows" ref=${box} onScroll=${look} onKeyDown=${keys}>
      <table aria-label=${label} aria-rowcount=${items.length + 1}>
        <thead>
          <tr aria-rowindex="1">
            ${columns.map(({ name, title }) => html`<th scope="col" class=${`c-${name}`}>${title}</th>`)}
          </tr>
        </thead>
        <tbody>
          ${
            first > 0 &&
            html`<tr aria-hidden="true" class="space" style=${{ height: `${first * ROW}px` }}></tr>`
          }
          ${shown.map(
            (item, index) => html`
              <tr
                key=${item.id}
                data-id=${item.id}
                aria-rowindex=${first + index + 2}
                tabindex=${item.id === reachable ? 0 : -1}
                class=${item.id === active ? "active" : ""}
                onFocus=${() => setFocused(item.id)}
                onClick=${(event) => event.target.closest("button, a, input") || onOpen(item)}
              >
                ${columns.map(({ name, cell }) => html`<td class=${`c-${name}`}>${cell(item)}</td>`)}
              </tr>
            `,
          )}
          ${
            last < items.length &&
            html`
              <tr
                aria-hidden="true"
                class="space"
                style=${{ height: `${(items.length - last) * ROW}px` }}
              ></tr>
            `
          }
        </tbody>
      </table>
    </div>
  `;
}
