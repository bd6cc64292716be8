// Rows in window order and tokens on the map: pick one, see the arithmetic that finds the other.
function build(data, ui) {
  const [H, W] = data.size, w = data.window;
  const down = Math.ceil(H / w), across = Math.ceil(W / w), N = w * w;
  const [Hp, Wp] = [down * w, across * w];
  const colours = [BLUE, ORANGE, "#009e73", RED, "#cc79a7", SKY];
  let row = data.start;

  const shifts = ui.slider("Shift", [...Array(w).keys()].map(String), data.shift);
  const rolled = (i, s, n) => (i + s >= n ? i + s - n : i + s);

  // The whole way from a row to its place, step by step.
  function way(r, s) {
    const window = Math.floor(r / N), token = r % N;
    const [wy, wx] = [Math.floor(window / across), window % across];
    const y = rolled(wy * w + Math.floor(token / w), s, Hp);
    const x = rolled(wx * w + (token % w), s, Wp);
    return { window, token, wy, wx, y, x, there: y < H && x < W };
  }

  function back(y, x, s) {
    const [ry, rx] = [(y - s + Hp) % Hp, (x - s + Wp) % Wp];
    return (Math.floor(ry / w) * across + Math.floor(rx / w)) * N + (ry % w) * w + (rx % w);
  }

  const map = ui.board("The padded map: tokens by number", Hp, Wp, (y, x) => { row = back(y, x, shifts.index); }, 360);
  const memory = ui.board("Rows in window order: one line a window", down * across, N, (i, j) => { row = i * N + j; }, 480);

  function paint(board, i, j, w) {
    board.fill(i, j, w.there ? colours[w.window % colours.length] : "#e4e4e4");
    board.frame(i, j, "#ffffff", 1, 1, 0.05);
    board.text(i, j, w.there ? String(w.y * W + w.x) : "–", w.there && w.window % colours.length === 0 ? "#ffffff" : BLACK);
  }

  return () => {
    const s = shifts.index;
    map.clear();
    memory.clear();
    for (let r = 0; r < down * across * N; r++) {
      const it = way(r, s);
      paint(map, it.y, it.x, it);
      paint(memory, it.window, it.token, it);
    }
    const it = way(row, s);
    map.at = [it.y, it.x];
    memory.at = [it.window, it.token];
    for (const board of [map, memory]) board.frame(...board.at, BLACK, 1, 1, 0.16);
    const place = it.there ? `token ${it.y} · ${W} + ${it.x} = ${it.y * W + it.x}` : "padding: a row of zeros";
    ui.say(`Row ${row}: window ${it.window} at (${it.wy}, ${it.wx}), token ${it.token} of it; on the map (${it.y}, ${it.x}): ${place}.`);
    return { row, shift: s, y: it.y, x: it.x, there: it.there };
  };
}
