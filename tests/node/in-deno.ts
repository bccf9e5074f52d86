import { check } from "./checks.mjs";

await check((step: string) => console.log(step));
console.log("all checks passed");
