// Drawings: each figure's specification becomes a drawing in the place before it. Without `eval` of anything but Vega's
// own expressions, and without its menu, which would lead out of the page.
for (const place of document.querySelectorAll("figure > .drawing")) {
  const spec = JSON.parse(place.nextElementSibling.textContent);
  const tooltip = { theme: "custom", disableDefaultStyle: true };
  vegaEmbed(place, spec, { actions: false, renderer: "svg", tooltip }).catch((error) => console.error(error));
}

// Tables that a click on a head sorts: first ascending, then the other way round. Cells without a value stay last.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  const value = (row, column) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
  const compare = (one, other) =>
    isFinite(one) && isFinite(other) ? Number(one) - Number(other) : one.localeCompare(other, undefined, { numeric: true });
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const descending = head.getAttribute("aria-sort") === "ascending";
      const rows = [...body.rows].map((row) => [value(row, column), row]);
      rows.sort(([one], [other]) => {
        if (one === "" || other === "") return (one === "") - (other === "");
        return descending ? compare(other, one) : compare(one, other);
      });
      body.append(...rows.map(([, row]) => row));
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    });
  });
}
