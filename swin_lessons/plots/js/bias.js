// A position bias under a change of window: all offsets as colours, and one row of them as curves, a curve for each kind.
function build(data, ui) {
  const COLOURS = [BLUE, ORANGE, "#009e73", RED]; // as in the printed figures
  const widest = Math.max(...data.windows) - 1, side = data.trained - 1;
  let [dy, dx] = [0, 1];
  const sides = ui.slider("Window", data.windows.map((w) => `${w} × ${w}`), data.start);
  const kinds = ui.choice("Bias", data.kinds.map((kind) => kind.name));
  const heads = ui.choice("Head", data.heads);
  const table = ui.board("Bias by offset: the darker, the higher", 7, 7, (row, column) => {
    const w = data.windows[sides.index];
    [dy, dx] = [row - w + 1, column - w + 1];
  });
  const curve = ui.board("The row of the framed offset, all kinds of bias", 10, 16, null, 384);

  return () => {
    const w = data.windows[sides.index], wide = 2 * w - 1, reach = w - 1, head = heads.index;
    [dy, dx] = [dy, dx].map((d) => Math.min(Math.max(d, -reach), reach));
    const entry = (kind, y, x) => data.kinds[kind].tables[sides.index][head][(y + reach) * wide + x + reach];
    const own = data.kinds[kinds.index].ranges[head];
    const all = data.kinds.map((kind) => kind.ranges[head]);
    const range = [Math.min(...all.map((r) => r[0])), Math.max(...all.map((r) => r[1]))];
    const share = (value, [low, high]) => Math.min(Math.max((value - low) / (high - low), 0), 1);

    table.clear(wide, wide);
    for (let y = -reach; y <= reach; y++) {
      for (let x = -reach; x <= reach; x++) {
        table.fill(y + reach, x + reach, `rgba(0, 114, 178, ${share(entry(kinds.index, y, x), own).toFixed(3)})`);
      }
    }
    const edge = reach - side; // offsets that training never saw lie outside this frame
    if (edge > 0) table.frame(edge, edge, BLACK, 2 * side + 1, 2 * side + 1, 0.04 * wide / 7);
    table.frame(dy + reach, dx + reach, ORANGE, 1, 1, 0.22);
    table.at = [dy + reach, dx + reach];

    curve.clear(10, 16);
    const across = (x) => 8.4 + (7 * x) / widest, down = (value) => 8.6 - 7.2 * share(value, range);
    if (Math.abs(dy) <= side) curve.fill(0.9, across(-side), "rgba(140, 140, 140, 0.18)", 8, across(side) - across(-side));
    data.kinds.forEach((kind, i) => {
      const path = curve.context;
      path.strokeStyle = COLOURS[i];
      path.lineWidth = i === kinds.index ? 0.12 : 0.05;
      path.beginPath();
      for (let x = -reach; x <= reach; x++) path.lineTo(across(x), down(entry(i, dy, x)));
      path.stroke();
      curve.text(0.05, 2.3 + 5.2 * i, kind.name, COLOURS[i], 0.5);
    });
    const mark = curve.context;
    mark.fillStyle = COLOURS[kinds.index];
    mark.beginPath();
    mark.arc(across(dx), down(entry(kinds.index, dy, dx)), 0.2, 0, 7);
    mark.fill();
    for (const value of range) curve.text(down(value) - 0.5, 0, value.toFixed(1), GREY, 0.45);
    for (const x of [-widest, -side, 0, side, widest]) curve.text(8.9, across(x) - 0.5, x, BLACK, 0.45);

    const value = entry(kinds.index, dy, dx);
    const seen = Math.max(Math.abs(dy), Math.abs(dx)) <= side;
    ui.say(`Offset of ${many(dy, "row")} and ${many(dx, "column")}: bias ${value.toFixed(2)} by ${data.kinds[kinds.index].name}. ` +
      (seen ? "Training saw this offset." : `Training, with windows of ${data.trained}, never saw it.`));
    return { window: w, kind: kinds.index, head, offset: [dy, dx], value, seen };
  };
}
