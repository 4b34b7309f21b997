// Tensors as the API sends and takes them: safetensors files, and numbers in base64.

import { raw } from "./api.js";

const half = (bits) => {
  const [sign, exponent, fraction] = [bits >> 15 ? -1 : 1, (bits >> 10) & 31, bits & 1023];
  return (
    sign *
    (exponent === 31
      ? fraction
        ? NaN
        : Infinity
      : exponent
        ? 2 ** (exponent - 15) * (1 + fraction / 1024)
        : 2 ** -24 * fraction)
  );
};

const READ = {
  F32: (view, at) => view.getFloat32(at * 4, true),
  F16: (view, at) => half(view.getUint16(at * 2, true)),
  I64: (view, at) => Number(view.getBigInt64(at * 8, true)),
};

const ARRAYS = {
  float32: Float32Array,
  float64: Float64Array,
  int32: Int32Array,
  int64: BigInt64Array,
  uint8: Uint8Array,
  bool: Uint8Array,
};
/** The numbers of an array that an installed reader returned. */
export const numbersOf = ({ dtype, data }) => {
  const bytes = Uint8Array.from(atob(data), (each) => each.charCodeAt(0));
  return Array.from(new ARRAYS[dtype](bytes.buffer), Number);
};

/** bfloat16 is the upper half of a float32. */
function brain(view, count) {
  const bits = new Uint32Array(count);
  for (let at = 0; at < count; at += 1) bits[at] = view.getUint16(at * 2, true) << 16;
  return new Float32Array(bits.buffer);
}

/** {name: {shape, values}} of a safetensors file. */
export function parsed(buffer) {
  const head = Number(new DataView(buffer).getBigUint64(0, true));
  const { __metadata__, ...entries } = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, head)));
  return Object.fromEntries(
    Object.entries(entries).map(
      ([
        name,
        {
          dtype,
          shape,
          data_offsets: [from, to],
        },
      ]) => {
        const view = new DataView(buffer, 8 + head + from, to - from);
        const count = shape.reduce((product, size) => product * size, 1);
        if (dtype !== "BF16" && !READ[dtype]) throw new Error(`the page does not read rows of ${dtype}`);
        return [
          name,
          {
            shape,
            values:
              dtype === "BF16"
                ? brain(view, count)
                : Float32Array.from({ length: count }, (_, at) => READ[dtype](view, at)),
          },
        ];
      },
    ),
  );
}

/** The rows of one prompt of a job at one layer. */
export async function rowsOf(job, { request = 0, layer, signal }) {
  return parsed(
    await (
      await raw(`/v1/captures/${job}/safetensors?request=${request}&layers=${layer}`, { signal })
    ).arrayBuffer(),
  );
}

/** Numbers as a request has a vector. */
export function vector(values) {
  const bytes = new Uint8Array(Float32Array.from(values).buffer);
  return {
    dtype: "float32",
    shape: [values.length],
    data: btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join("")),
  };
}
