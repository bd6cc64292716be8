// The relative position index: which entry of the bias table serves a query and a key.
function build(data, ui) {
  let [query, key] = [[1, 1], [0, 2]];
  const sides = ui.slider("Window", data.windows.map((w) => `${w} × ${w}`), data.start);
  const picking = ui.choice("The click moves the", ["query", "key"]);
  const inside = ui.board("The window: which entry each key gets", 4, 4, (row, column) => {
    if (picking.index) key = [row, column];
    else query = [row, column];
  });
  const table = ui.board("The table, by offset", 7, 7);

  return () => {
    const w = data.windows[sides.index], wide = 2 * w - 1;
    query = query.map((i) => Math.min(i, w - 1));
    key = key.map((i) => Math.min(i, w - 1));
    const offset = (row, column) => [query[0] - row, query[1] - column];
    const entry = (row, column) => {
      const [dy, dx] = offset(row, column);
      return (dy + w - 1) * wide + dx + w - 1;
    };
    inside.clear(w, w);
    table.clear(wide, wide);
    const index = [];
    for (let row = 0; row < wide; row++) {
      for (let column = 0; column < wide; column++) {
        table.frame(row, column, "rgba(140, 140, 140, 0.5)", 1, 1, 0.03);
        table.text(row, column, row * wide + column, GREY);
      }
    }
    for (let row = 0; row < w; row++) {
      for (let column = 0; column < w; column++) {
        const [dy, dx] = offset(row, column);
        index.push(entry(row, column));
        inside.frame(row, column, "rgba(140, 140, 140, 0.5)", 1, 1, 0.02);
        inside.text(row, column, entry(row, column));
        table.fill(dy + w - 1, dx + w - 1, "#d6e9f5");
        table.text(dy + w - 1, dx + w - 1, entry(row, column));
      }
    }
    inside.frame(...query, ORANGE, 1, 1, 0.1);
    inside.frame(...key, BLUE, 1, 1, 0.1);
    const [dy, dx] = offset(...key);
    table.frame(dy + w - 1, dx + w - 1, BLUE, 1, 1, 0.16);
    inside.at = picking.index ? key : query;
    const sum = `(${dy} + ${w - 1}) × ${wide} + (${dx} + ${w - 1})`;
    ui.say(`Query (${query}) and key (${key}): the offset is ${many(dy, "row")}, ${many(dx, "column")}; entry ${sum} = ${entry(...key)} of ${wide * wide}.`);
    return { window: w, query, key, index };
  };
}
