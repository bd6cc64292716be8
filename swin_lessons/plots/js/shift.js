// Windows, shift and mask: pick a token, see whom it attends to.
function build(data, ui) {
  const n = data.tokens; // on a side
  const picture = new Image();
  picture.src = data.image;
  let token = data.start; // [row, column] in the image
  const wrap = (i) => (i + n) % n;

  const windows = ui.slider("Window", data.windows.map((w) => `${w} × ${w}`), data.windows.length - 1);
  const shifts = ui.slider("Shift", [...Array(n).keys()].map(String), 0);
  const mask = ui.tick("mask", true);
  const plain = ui.board("The image, cut into windows", n, n, (row, column) => { token = [row, column]; });
  const rolled = ui.board("Rolled up and left, cut regularly", n, n, (row, column) => {
    token = [wrap(row + shifts.index), wrap(column + shifts.index)];
  });
  shifts.index = data.shift;
  picture.addEventListener("load", () => ui.draw());

  function relation(row, column, w, s) {
    // Both in the window of the picked token? On the same side of the seam, too?
    const place = (i) => Math.floor(wrap(i - s) / w);
    const together = place(row) === place(token[0]) && place(column) === place(token[1]);
    const wraps = (i) => i < s;
    const side = wraps(row) === wraps(token[0]) && wraps(column) === wraps(token[1]);
    return together ? (side || !mask.on ? "seen" : "masked") : "outside";
  }

  function paint(map, w, s, move) {
    map.clear();
    const c = map.context, size = picture.naturalWidth / n;
    for (let row = 0; row < n; row++) {
      for (let column = 0; column < n; column++) {
        const [y, x] = [wrap(row + move), wrap(column + move)];
        if (picture.naturalWidth) c.drawImage(picture, x * size, y * size, size, size, column, row, 1, 1);
        const kind = relation(y, x, w, s);
        if (kind === "outside") map.fill(row, column, "rgba(255, 255, 255, 0.72)");
        if (kind === "masked") map.fill(row, column, "rgba(213, 94, 0, 0.75)");
        map.frame(row, column, "rgba(140, 140, 140, 0.5)", 1, 1, 0.02);
      }
    }
  }

  function cuts(map, w, first) {
    const c = map.context;
    c.fillStyle = BLACK;
    for (let i = first; i <= n; i += w) {
      c.fillRect(i - 0.03, 0, 0.06, n);
      c.fillRect(0, i - 0.03, n, 0.06);
    }
  }

  return () => {
    const w = data.windows[windows.index];
    shifts.last = w - 1;
    const s = shifts.index;
    paint(plain, w, s, 0);
    paint(rolled, w, s, s);
    cuts(plain, w, s % w);
    cuts(rolled, w, 0);
    if (s) for (const side of [[n - s, 0, s, n], [0, n - s, n, s]]) rolled.frame(side[0], side[1], SKY, side[2], side[3]);
    plain.at = token;
    rolled.at = [wrap(token[0] - s), wrap(token[1] - s)];
    plain.frame(...plain.at, ORANGE, 1, 1, 0.16);
    rolled.frame(...rolled.at, ORANGE, 1, 1, 0.16);

    const count = { seen: 0, masked: 0 }, seen = [];
    for (let i = 0; i < n * n; i++) {
      const kind = relation(Math.floor(i / n), i % n, w, s);
      if (kind in count) count[kind]++;
      if (kind === "seen") seen.push(i);
    }
    const where = `Token (${token[0]}, ${token[1]}) attends to ${count.seen} of the ${w * w} tokens of its window.`;
    ui.say(count.masked ? `${where} The mask hides ${count.masked} from other edges of the image.` : where);
    return { window: w, shift: s, token, seen };
  };
}
