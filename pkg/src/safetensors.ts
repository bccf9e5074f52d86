const MAX_HEADER = 100_000_000;

/** Refuses a file whose header and length do not belong together. Throws an `Error` that says what is wrong. */
export async function checkSafetensors(blob: Blob): Promise<void> {
  if (blob.size < 8) throw new Error(`is cut: ${blob.size} bytes`);
  const length = Number(new DataView(await blob.slice(0, 8).arrayBuffer()).getBigUint64(0, true));
  if (length > MAX_HEADER) throw new Error("is not a safetensors file");
  if (8 + length > blob.size) throw new Error(`is cut inside its header: ${blob.size} bytes, the header alone takes ${8 + length}`);
  let header: Record<string, { data_offsets?: unknown }>;
  try {
    header = JSON.parse(await blob.slice(8, 8 + length).text());
  } catch {
    throw new Error("has a header that is not JSON");
  }
  let end = 0;
  for (const [name, tensor] of Object.entries(header)) {
    if (name === "__metadata__") continue;
    const offsets = tensor?.data_offsets;
    if (!Array.isArray(offsets) || !offsets.every(Number.isSafeInteger)) throw new Error(`has no offsets for tensor \`${name}\``);
    end = Math.max(end, offsets[1] as number);
  }
  const size = 8 + length + end;
  if (size !== blob.size) throw new Error(`has ${blob.size} bytes, its header says ${size}`);
}

/** Whether nine bytes can be the beginning of such a file: a length, and the brace that the header begins with. */
export function startsSafetensors(bytes: Uint8Array): boolean {
  return new DataView(bytes.buffer, bytes.byteOffset).getBigUint64(0, true) <= MAX_HEADER && bytes[8] === 0x7b;
}
