// Two streams of one prompt, without and with steering; what each has said, and the values of its tokens.

import { del, get, post, sse } from "./api.js";
import { PATHS, asked, bodyOf, fieldOf } from "./playground_request.js";

const PAUSE = 50;

class Side {
  constructor(name, title) {
    Object.assign(this, { name, title, state: "idle", note: "", error: null, job: null });
    this.pieces = []; // of the text as they came; mostly a token each
    this.first = null; // position of the first generated token
    this.words = null; // generated tokens, once they are known
    this.given = []; // the prompt's
    this.values = new Map(); // position → number
  }

  /**
   * The largest value that a colour must show; the first token is left out, whose row is an outlier in
   * most models.
   */
  limit() {
    let most = 0;
    for (const [position, value] of this.values)
      if (position > 0 && value !== null) most = Math.max(most, Math.abs(value));
    return most;
  }
}

export const sides = () => [new Side("baseline", "Baseline"), new Side("steered", "Steered")];

export class Stream {
  /**
   * `changed` is called when something is new, after at most `PAUSE` milliseconds: long texts are
   * drawn anew each time.
   */
  constructor(form, changed) {
    this.form = form;
    this.sides = sides();
    this.leaving = new AbortController();
    this.open = false;
    this.stopped = false;
    let waiting = false;
    this.changed = () => {
      if (waiting) return;
      waiting = true;
      setTimeout(() => {
        waiting = false;
        if (!this.leaving.signal.aborted) changed();
      }, PAUSE);
    };
  }

  /** Until both streams are over. Returns an error that belongs to a field of the form, if there is one. */
  async run() {
    this.open = true;
    const errors = await Promise.all(this.sides.map((side) => this.follow(side)));
    this.open = false;
    return errors.find(Boolean) || null;
  }

  /** Closes both streams; their jobs go on. */
  close() {
    this.leaving.abort();
    this.open = false;
  }

  /** Cancels the jobs; the streams end with them. */
  async stop() {
    this.stopped = true;
    await Promise.all(
      this.sides.filter(({ job, state }) => job && state === "running").map((side) => this.cancel(side)),
    );
  }

  async cancel(side) {
    await post(`/v1/jobs/${side.job}/cancel`).catch((error) => {
      if (error.status !== 409) throw error; // it has ended meanwhile
    });
  }

  async follow(side) {
    const { form } = this;
    const { signal } = this.leaving;
    Object.assign(side, { state: "running", note: "waiting …" });
    this.changed();
    try {
      await sse(PATHS[form.mode], {
        method: "POST",
        body: {
          ...bodyOf(form, side.name === "steered"),
          stream: true,
          stream_options: { include_usage: true },
        },
        signal,
        onState: (connected, error, answer) =>
          answer && this.begun(side, answer.headers.get("x-midstream-job")),
        onEvent: ({ data }) => this.take(side, data),
      });
      if (signal.aborted) return null;
      await this.read(side);
      side.note = side.finish ? `finished: ${side.finish}, ${side.tokens} tokens` : "ended";
    } catch (error) {
      if (signal.aborted || error.name === "AbortError") return null;
      if (this.stopped) side.note = "stopped";
      else {
        side.note = "";
        if (fieldOf(error.field, form)) return error;
        side.error = error;
      }
    } finally {
      side.state = "over";
      this.changed();
    }
    return null;
  }

  begun(side, job) {
    side.job = job;
    side.note = "generating …";
    if (this.stopped) this.cancel(side).catch((error) => (side.error = error));
    this.changed();
  }

  /** One chunk. */
  take(side, data) {
    for (const { index, position, scores } of data.scores || []) {
      if (index !== 0 || !this.form.colour || !this.form.colour.probe) continue;
      // the first scores are those of the prompt's last token
      if (side.first === null) side.first = position + 1;
      side.values.set(position, scores[this.form.colour.probe][this.form.colour.label]);
    }
    for (const choice of data.choices || []) {
      const text = choice.text ?? (choice.delta && choice.delta.content);
      if (text) side.pieces.push(text);
      if (choice.finish_reason) side.finish = choice.finish_reason;
    }
    if (data.usage) side.tokens = data.usage.completion_tokens;
    for (const probe of data.probes || []) {
      const { colour } = this.form;
      if (!colour || probe.probe !== colour.probe || !probe.tokens) continue;
      probe.tokens.forEach((scores, position) => side.values.set(position, scores[colour.column]));
    }
    this.changed();
  }

  /**
   * The tokens and, of a module, the projections on it: the component of each row along the module's
   * vector.
   */
  async read(side) {
    const { colour, model } = this.form;
    const { signal } = this.leaving;
    if (!colour) return;
    const { outputs } = await get(`/v1/jobs/${side.job}/result`, { signal });
    const [given, generated] = await Promise.all([
      post("/v1/tokenize", { model, ...asked(this.form) }, { signal }),
      post("/v1/detokenize", { model, tokens: outputs[0].token_ids }, { signal }),
    ]);
    if (colour.module) {
      const query = new URLSearchParams({
        hook: colour.hook,
        module: colour.module,
        module_layer: colour.layer,
        count: 4096,
      });
      const found = await get(`/v1/captures/${side.job}/norms?${query}`, { signal });
      found.positions.forEach((position, row) => {
        const [norm, cosine] = [found.norms[0][row], found.cosines[0][row]];
        side.values.set(position, norm === null || cosine === null ? null : norm * cosine);
      });
      await del(`/v1/captures/${side.job}`, { signal }); // it was for the colours alone
    }
    side.given = given.token_strs;
    side.words = generated.token_strs;
  }
}
