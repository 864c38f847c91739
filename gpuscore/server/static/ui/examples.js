// What the button Example fills in: texts that the served model understands.

// The demo model was trained on such texts, and understands no others.
const CHAIRS = {
  query: "a blue wooden chair for the garden",
  items: "A red steel lamp.\nA wooden garden chair in blue.\nA blue wool scarf.\nA chair of steel.",
};
const QUESTION = {
  query: "Why is the sky blue?",
  items: "Sharks have no bones.\n" +
    "Air scatters blue light more than red light, so the sky looks blue.\n" +
    "The recipe needs two eggs and a cup of sugar.",
};
// Two answered examples make a model go on with one of the labels.
const REVIEWS = {
  query: "Review: The cake was lovely. Sentiment: positive\n" +
    "Review: The cake was awful. Sentiment: negative\nReview: ",
  items: ["I love this phone, the battery lasts for days.", "The soup was cold and the waiter was rude.",
    "The film was not bad at all."].map((text) => `${text} Sentiment:`).join("\n"),
  labels: " positive\n negative",
};

/** Choose an example for a request's model and task. */
export function exampleFor({ info, state }) {
  if (info?.gpuscore.family?.name === "demo") return CHAIRS;
  return state.task === "score" && !state.family ? REVIEWS : QUESTION;
}
