// Receptive fields: pick a token and a block, see the patches it depends on, with and without the shift.
function build(data, ui) {
  let place = data.start; // of the picked token, as shares of the height and the width
  const network = ui.choice("Network", data.networks.map((net) => net.name));
  const depth = Math.max(...data.networks.map((net) => net.blocks.length));
  const behind = ui.slider("Behind block", [...Array(depth).keys()].map((i) => `${i + 1}`), data.block);
  const shifted = ui.tick("shift", true);
  const map = ui.board("Click a token: the patches it depends on", 8, 8, (row, column) => {
    place = [(row + 0.5) / map.rows, (column + 0.5) / map.columns];
  }, 336);

  function cuts(axis, length, window, shift, other) {
    for (let at = shift || window; at < length; at += window) {
      if (axis) map.fill(0, at - length / 500, GREY, other, length / 250);
      else map.fill(at - length / 500, 0, GREY, length / 250, other);
    }
  }

  return () => {
    const blocks = data.networks[network.index].blocks, first = blocks[0].size;
    behind.last = blocks.length - 1;
    const b = blocks[behind.index], token = place.map((share, axis) => Math.floor(share * b.size[axis]));
    const [rows, columns] = [0, 1].map((axis) => b.fields[Number(shifted.on)][axis][token[axis]]);
    const tall = 2 ** (b.stage - 1); // patches along a side of a token
    map.clear(first[0] / tall, first[1] / tall);
    for (let i = rows.length - 2; i >= 0; i -= 2) { // the widest field first, the others on it
      const light = 35 + (50 * i) / Math.max(rows.length - 2, 1);
      map.fill(rows[i] / tall, columns[i] / tall, `hsl(202, 100%, ${light}%)`,
        (rows[i + 1] + 1 - rows[i]) / tall, (columns[i + 1] + 1 - columns[i]) / tall);
    }
    const shift = shifted.on ? b.shift : [0, 0];
    [0, 1].forEach((axis) => cuts(axis, b.size[axis], b.window[axis], shift[axis], b.size[1 - axis]));
    map.frame(token[0], token[1], ORANGE, 1, 1, Math.min(0.012 * b.size[0], 0.3));
    map.at = token;
    Object.assign(map, { rows: b.size[0], columns: b.size[1] });

    const [top, bottom] = rows.slice(-2), [left, right] = columns.slice(-2);
    const patches = (bottom + 1 - top) * (right + 1 - left);
    ui.say(`Behind block ${behind.index + 1} (stage ${b.stage}), token (${token.join(", ")}) depends on `
      + `${bottom + 1 - top} × ${right + 1 - left} of the ${first.join(" × ")} patches: `
      + `${Math.round((100 * patches) / (first[0] * first[1]))} % of the image.`);
    return { network: network.index, block: behind.index, shift: shifted.on, token, field: [top, bottom, left, right] };
  };
}
