// Headings of tables of numbers become buttons that sort the rows. Without this script the tables
// are the same, in the order of the measurements.
"use strict";

// The first number of a cell: "**11.5** (fused)", "-35 %" and "1 x 8192 x 2048" have one.
function numberOf(text) {
  const found = text.replace("−", "-").match(/[-+]?\d+(\.\d+)?(e[-+]?\d+)?/i);
  return found ? Number(found[0]) : Number.NaN;
}

function sortBy(table, column, descending) {
  const body = table.tBodies[0];
  const numeric = table.tHead.rows[0].cells[column].style.textAlign === "right";
  const keyed = Array.from(body.rows, (row) => {
    const text = row.cells[column].textContent.trim();
    return { row, text, number: numberOf(text) };
  });
  keyed.sort((a, b) => {
    // Cells without a value are last in both directions.
    if (!a.text || !b.text) return (a.text ? 0 : 1) - (b.text ? 0 : 1);
    const order = numeric
      ? a.number - b.number
      : a.text.localeCompare(b.text, "en", { numeric: true });
    return descending ? -order : order;
  });
  body.append(...keyed.map((entry) => entry.row));
}

for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
  const headings = Array.from(table.tHead?.rows[0]?.cells ?? []);
  const numbers = headings.some((heading) => heading.style.textAlign === "right");
  if (!numbers || table.tBodies[0].rows.length < 3) continue;
  headings.forEach((heading, column) => {
    if (!heading.textContent.trim()) return;
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const descending = heading.getAttribute("aria-sort") === "ascending";
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
      sortBy(table, column, descending);
    });
  });
}
