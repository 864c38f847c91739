/* Helps extra.css where a page is narrow. */

/* Names the column in each cell of a table with sentences in it: the rows of such tables are shown
   one below the other. Tables of numbers scroll instead. */
for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
  const titles = [...table.querySelectorAll("th")].map((title) => title.textContent.trim());
  const cells = [...table.querySelectorAll("td")];
  if (titles.length < 3 || cells.every((cell) => cell.textContent.length < 40)) continue;
  table.dataset.stacks = "";
  for (const cell of cells) cell.dataset.column = titles[cell.cellIndex];
}

/* Marks inline code that fits on a line of the narrowest pages, to be kept whole; of longer code,
   its words. */
for (const code of document.querySelectorAll(".md-typeset :not(pre) > code")) {
  if (code.textContent.length <= 28) code.dataset.short = "";
  else if (!code.childElementCount && code.textContent.includes(" ") && !code.closest("td")) {
    const parts = code.textContent.split(/( )/).map((word) => {
      if (word === " " || word.length > 28) return word;
      const span = document.createElement("span");
      span.textContent = word;
      span.dataset.short = "";
      return span;
    });
    code.replaceChildren(...parts);
  }
}

/* Lets long code in a table break after its own marks instead of anywhere. */
for (const code of document.querySelectorAll(".md-typeset td code")) {
  if (code.childElementCount || code.textContent.length <= 28) continue;
  const parts = code.textContent.split(/(?<=[_/:=,;])(?![_/:=,;])/);
  code.replaceChildren(...parts.flatMap((part, at) => at ? [document.createElement("wbr"), part] : [part]));
}
