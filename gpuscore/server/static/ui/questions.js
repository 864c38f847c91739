// Typed questions: lines of the form as questions of /v1/decisions and /v1/systemone, and the shares of
// their answers.

/** A line's question and options, and what kind it is; null for JSON, which is a question itself. */
function parsed(given) {
  if (typeof given === "object" && given !== null) return null;
  for (const [mark, type] of [["|", "choice"], ["<", "score"]]) {
    const [instructions, ...options] = String(given).split(mark).map((part) => part.trim());
    if (options.length > 1) return { type, instructions, options };
  }
  return { type: "yes or no", instructions: String(given), options: [] };
}

export function asQuestion(given) {
  const line = parsed(given);
  if (line === null) return given;
  const { type, instructions, options } = line;
  if (type === "choice") return { type, instructions, choices: options.map((value) => ({ value })) };
  if (type === "score") return { type, instructions, levels: options.map((label) => ({ label })) };
  return { type: "predicate", instructions };
}

export const numbered = (index) => `q${index + 1}`;

export function asTyped(given) {
  const line = parsed(given);
  if (line === null) return given;
  const { type, instructions, options } = line;
  if (type === "choice") {
    return { type, instructions, criteria: Object.fromEntries(options.map((name) => [name, null])) };
  }
  return type === "score" ? { type, instructions, criteria: options } : { type: "noul", instructions };
}

export function typedParts(one, mass) {
  const shares = one.type === "noul" ? { yes: one.noul, no: 1 - one.noul } : one.probabilities;
  return Object.entries(shares).map(([label, share]) => (
    { label: one.legend ? String(one.legend[label]) : label, share, probability: share * mass }));
}

export function partsOf(one) {
  if (one.type === "predicate") {
    return [["true", one.probability], ["false", 1 - one.probability]]
      .map(([label, share]) => ({ label, share, probability: share * one.label_mass }));
  }
  return one.probabilities.map(({ label, value, probability }) => (
    { label: String(label ?? value), share: probability, probability: probability * one.label_mass }));
}
