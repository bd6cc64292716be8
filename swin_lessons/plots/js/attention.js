// Attention of a trained network: pick a token, a block and a head; see the weights that its keys get.
function build(data, ui) {
  const pictures = data.images.map((source) => Object.assign(new Image(), { src: source.image, onload: () => ui.draw() }));
  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const weights = data.images.map((source) => source.weights.map(bytes));
  let place = data.start; // of the picked token, as shares of the height and the width

  const image = ui.choice("Image", data.images.map((source) => source.name));
  const block = ui.slider("Block", data.blocks.map((b) => b.name));
  const head = ui.slider("Head", [...Array(Math.max(...data.blocks.map((b) => b.heads)) + 1).keys()].map((h) => h ? `${h}` : "mean"));
  const at = (b) => place.map((share, axis) => Math.floor(share * b.size[axis]));
  const map = ui.board("Click a token: how much it takes from where", 8, 8, (row, column) => {
    place = [(row + 0.5) / map.rows, (column + 0.5) / map.columns];
  }, 320);

  return () => {
    const b = data.blocks[block.index];
    const [H, W] = b.size, [row, column] = at(b), tokens = H * W, query = row * W + column;
    head.last = b.heads;
    const all = weights[image.index][block.index];
    const heads = head.index ? [head.index - 1] : [...Array(b.heads).keys()];
    const share = [...Array(tokens).keys()].map((key) =>
      heads.reduce((sum, h) => sum + all[(h * tokens + query) * tokens + key], 0) / heads.length / 255);
    const top = Math.max(...share), best = share.indexOf(top);
    map.clear(H, W);
    const c = map.context, picture = pictures[image.index];
    c.imageSmoothingEnabled = false;
    if (picture.naturalWidth) c.drawImage(picture, 0, 0, W, H);
    share.forEach((value, key) => {
      if (value > 0) map.fill(Math.floor(key / W), key % W, `rgba(0, 114, 178, ${0.1 + (0.8 * value) / top})`);
    });
    map.frame(row, column, ORANGE, 1, 1, 0.02 * W);
    map.at = [row, column];
    const some = share.filter((value) => value > 0).length;
    const where = `(${Math.floor(best / W)}, ${best % W})`;
    ui.say(`Token (${row}, ${column}) takes from ${many(some, "token")}; most, ${Math.round(100 * top)} %, from ${where}.`);
    return { block: block.index, head: head.index, token: [row, column], share };
  };
}
