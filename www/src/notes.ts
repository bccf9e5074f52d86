// What the page keeps besides the sessions themselves: titles, where documents end, what was measured.

/** Of a session. */
export interface Note {
  title: string;
  /** Tokens of the document, with what comes before it. */
  document: number;
  /** Characters of the document. */
  characters: number;
  /** Questions to try. */
  questions: string[];
}

/** Storage that may be denied: the page goes on without. */
export const kept: Storage = (() => {
  try {
    localStorage.setItem("cedra-page/probe", "1");
    localStorage.removeItem("cedra-page/probe");
    return localStorage;
  } catch {
    const map = new Map<string, string>();
    return {
      get length() {
        return map.size;
      },
      clear: () => map.clear(),
      getItem: (key) => map.get(key) ?? null,
      key: (at) => [...map.keys()][at] ?? null,
      removeItem: (key) => void map.delete(key),
      setItem: (key, value) => void map.set(key, value),
    };
  }
})();

function read<T>(key: string, otherwise: T): T {
  try {
    return (JSON.parse(kept.getItem(key) ?? "null") as T | null) ?? otherwise;
  } catch {
    return otherwise;
  }
}

const write = (key: string, value: unknown): void => {
  try {
    kept.setItem(key, JSON.stringify(value));
  } catch {
    // A full storage costs titles and measurements, not sessions.
  }
};

const noteKey = (store: string, name: string): string => `cedra-page/note/${store}/${name}`;

export const noteOf = (store: string, name: string): Note | undefined => read<Note | undefined>(noteKey(store, name), undefined);
export const setNote = (store: string, name: string, note: Note): void => write(noteKey(store, name), note);
export const dropNote = (store: string, name: string): void => kept.removeItem(noteKey(store, name));

const lastKey = (store: string): string => `cedra-page/last/${store}`;
export const lastSession = (store: string): string | undefined => kept.getItem(lastKey(store)) ?? undefined;
export const setLast = (store: string, name: string | undefined): void => {
  if (name === undefined) kept.removeItem(lastKey(store));
  else kept.setItem(lastKey(store), name);
};

/** Tokens a second that were measured with a model on an adapter. */
export interface Speeds {
  read?: number;
  write?: number;
}
const speedKey = (store: string, adapter: string): string => `cedra-page/speed/${store}/${adapter}`;
export const speedsOf = (store: string, adapter: string): Speeds => read<Speeds>(speedKey(store, adapter), {});
export const setSpeeds = (store: string, adapter: string, speeds: Speeds): void => write(speedKey(store, adapter), speeds);
