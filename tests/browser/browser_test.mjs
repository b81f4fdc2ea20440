// The report and the live view as people meet them: in a real Chromium, without a window. Everything is waited for by its
// condition; nothing sleeps. Pictures are compared loosely: a coarse grid of brightness, so that fonts may differ.
//   node browser_test.mjs PROGRAM MODULES CHROMIUM
// EVENKEEL_UPDATE=1 writes looks.json anew.
import assert from 'node:assert/strict';
import {spawn, spawnSync} from 'node:child_process';
import fs from 'node:fs';
import {createRequire} from 'node:module';
import os from 'node:os';
import path from 'node:path';
import {after, before, test} from 'node:test';
import {fileURLToPath, pathToFileURL} from 'node:url';

const [program, modules, chromium] = process.argv.slice(2);
const playwright = createRequire(path.join(modules, 'package.json'))('playwright-core');
const here = path.dirname(fileURLToPath(import.meta.url));
const folder = fs.mkdtempSync(path.join(os.tmpdir(), 'evenkeel-browser-'));
const at = (...names) => path.join(folder, ...names);

const looks = JSON.parse(fs.readFileSync(path.join(here, 'looks.json'), 'utf8'));
const columns = 12, rows = 16;
// Of brightness between 0 and 1. Lines of text moved by another font change a cell by some hundredths.
const meanTolerance = 0.04, cellTolerance = 0.3;

let browser;
const children = new Set();

function run(...words) {
  const result = spawnSync(program, words, {encoding: 'utf8'});
  assert.ok([0, 1].includes(result.status), `${words.join(' ')}: ${result.status} ${result.stderr}`);
  return result.stdout;
}
// A program that goes on; its lines as they come.
function start(...words) {
  const child = spawn(program, words, {stdio: ['ignore', 'pipe', 'inherit']});
  children.add(child);
  child.ended = new Promise((resolve) => child.on('exit', (code) => {
    children.delete(child);
    resolve(code);
  }));
  child.firstLine = new Promise((resolve) => {
    let text = '';
    child.stdout.on('data', (bytes) => {
      text += bytes;
      if (text.includes('\n')) resolve(text.split('\n')[0]);
    });
  });
  return child;
}
async function until(condition) {
  while (!condition()) await new Promise((resolve) => setTimeout(resolve, 10));
}
const small = ['--set', 'model.layers = 2', '--set', 'model.heads = 2', '--set', 'model.width = 32', '--set',
  'model.context = 48', '--sequences', '8', '--seed', '3', '--lr', '1.2e-2', '--warmup', '20', '--backend', 'cpu'];
function train(name, steps, plan) {
  run('train', '--preset', 'micro', '--data', at('text.txt'), '--plan', plan, '--steps', String(steps), '--facts-every', '5',
    '--probe-every', '20', '--checkpoint-every', '40', ...small, '--out', at(name));
}

// A page that must have no fault: what it complains of, and whom it asks.
async function open(url, options = {}) {
  const context = await browser.newContext({viewport: {width: 1200, height: 900}, reducedMotion: 'reduce', ...options});
  context.setDefaultTimeout(20_000);
  const page = await context.newPage();
  page.complaints = [];
  page.requests = [];
  page.on('console', (message) => {
    if (['error', 'warning'].includes(message.type())) page.complaints.push(message.text());
  });
  page.on('pageerror', (error) => page.complaints.push(String(error)));
  page.on('request', (request) => page.requests.push(request.url()));
  await page.goto(url);
  return page;
}
function assertQuiet(page, origin) {
  assert.deepEqual(page.complaints, []);
  for (const url of page.requests) assert.ok(url.startsWith(origin), `asked ${url}`);
}

before(async () => {
  browser = await playwright.chromium.launch({executablePath: chromium, args: ['--no-sandbox', '--disable-gpu']});
  run('data', 'synth', '--out', at('text.txt'), '--bytes', '200000');
  train('rounded & <i>sum</i>', 160, 'fp32,row_sum=e5m2');
  train('healthy', 160, 'fp32');
  run('capture', `${at('rounded & <i>sum</i>')}@150`, '--layer', '1', '-o', at('rounded & <i>sum</i>', 'layer1.safetensors'));
  run('isolate', at('rounded & <i>sum</i>'), '--steps', '20', '--budget', '6');
  run('report', at('rounded & <i>sum</i>'), at('healthy'), '-o', at('report.html'));
});
after(async () => {
  await browser?.close();
  for (const child of children) child.kill('SIGKILL');
  fs.rmSync(folder, {recursive: true, force: true});
});

const report = () => pathToFileURL(at('report.html')).href;

// Every drawing with its marks, without axes and words: how many there are, and the part of the drawing that they span.
const drawings = (page) => page.evaluate(() => [...document.querySelectorAll('main svg:is(.chart, .heat, .dots)')].map((svg) => {
  const own = svg.getBoundingClientRect();
  const marks = [...svg.querySelectorAll('.plot path[data-name], .plot path.band, .cells path, .dot circle')]
    .map((mark) => mark.getBoundingClientRect()).filter((box) => box.width > 0 || box.height > 0);
  const span = (low, high) => Math.max(...marks.map((box) => box[high])) - Math.min(...marks.map((box) => box[low]));
  return {id: svg.id, width: own.width, height: own.height, marks: marks.length,
    across: marks.length ? span('left', 'right') / own.width : 0, words: svg.querySelectorAll('text').length};
}));
function assertDrawn(found) {
  assert.ok(found.length >= 6, `${found.length} drawings`);
  for (const drawing of found) {
    assert.ok(drawing.width > 60 && drawing.height > 20, JSON.stringify(drawing));
    assert.ok(drawing.marks >= 1 && drawing.across > 0.1 && drawing.words >= 2, JSON.stringify(drawing));
  }
}

test('the page is drawn, asks nobody and complains of nothing', async () => {
  const page = await open(report());
  assertDrawn(await drawings(page));
  assert.equal(await page.locator('main h1, main h2').first().isVisible(), true);
  for (const section of await page.locator('main section').all())
    assert.notEqual((await section.innerText()).trim(), '');
  assert.equal(await page.locator('main i').filter({hasText: /^sum$/}).count(), 0);  // names of runs are text
  assert.ok((await page.locator('body').innerText()).includes('rounded & <i>sum</i>'));
  assert.deepEqual(page.requests, [report()]);
  assertQuiet(page, 'file:');
  await page.context().close();
});

test('without JavaScript it is as whole', async () => {
  const page = await open(report(), {javaScriptEnabled: false});
  assertDrawn(await drawings(page));
  assertQuiet(page, 'file:');
  await page.context().close();
});

// What a reader cannot see whole: elements beyond the window, letters beyond their drawing or cut by a box that hides what
// does not fit, and letters of one drawing that lie on each other. What scrolls or is opened by a click is not cut off.
const cutOff = (page) => page.evaluate(() => {
  const found = [], words = (element) => element.textContent.trim().replace(/\s+/g, ' ').slice(0, 60);
  const fault = (what, element) => found.push(`${what}: <${element.localName} class="${element.getAttribute('class') ?? ''}"> ${words(element)}`);
  const scrolls = (element) => element.closest('pre, .scroll, .unseen, .skip, details:not([open])');
  if (document.documentElement.scrollWidth > innerWidth + 1) found.push(`the page is ${document.documentElement.scrollWidth} px wide`);
  for (const element of document.querySelectorAll('body *')) {
    const box = element.getBoundingClientRect();
    if (box.width === 0 || box.height === 0 || element.closest('svg') || scrolls(element)) continue;
    if (box.left < -1 || box.right > innerWidth + 1) fault('beyond the window', element);
    const hides = ['hidden', 'clip'].includes(getComputedStyle(element).overflowX) && element !== document.body;
    if (hides && element.scrollWidth > element.clientWidth + 1 && !element.title) fault('cut by its box', element);
  }
  for (const svg of document.querySelectorAll('main svg:is(.chart, .heat, .dots)')) {
    const box = svg.closest('.scroll'), clips = box && getComputedStyle(box).overflowX !== 'visible';
    const [least, most] = clips ? [box.getBoundingClientRect().left, box.getBoundingClientRect().left + box.scrollWidth] : [0, innerWidth];
    const texts = [...svg.querySelectorAll('text')].filter((text) => text.textContent.trim() && text.getClientRects().length)
      .map((text) => ({text, box: text.getBoundingClientRect()}));
    for (const {text, box} of texts) {
      if (box.left < least - 1 || box.right > most + 1) fault(`cut off in ${svg.id}`, text);
      const under = texts.find(({text: other, box: its}) => other !== text && text.compareDocumentPosition(other) & Node.DOCUMENT_POSITION_FOLLOWING &&
        Math.min(box.right, its.right) - Math.max(box.left, its.left) > 3 && Math.min(box.bottom, its.bottom) - Math.max(box.top, its.top) > 5);
      if (under) fault(`in ${svg.id}, under "${words(under.text)}"`, text);
    }
  }
  return found;
});
const windows = [1400, 400].flatMap((width) => ['light', 'dark'].map((colorScheme) => ({viewport: {width, height: 900}, colorScheme})));
async function assertWhole(url, ready = async () => {}) {
  for (const options of windows) {
    const page = await open(url, options);
    await ready(page);
    assert.deepEqual(await cutOff(page), [], JSON.stringify(options));
    assertQuiet(page, new URL(url).origin === 'null' ? 'file:' : url);
    await page.context().close();
  }
}

test('nothing is cut off at any width, by day and by night', async () => {
  await assertWhole(report());
  const page = await open(report(), windows[3]);  // each kind of fault is found
  for (const [word, html] of [
    ['beyond the window', '<p style="position: absolute; left: 300px; width: 200px">words</p>'],
    ['cut by its box', '<p style="width: 40px; overflow: hidden; white-space: nowrap">many words in a narrow box</p>'],
    ['cut off in planted', '<svg class="chart" id="planted" width="380" height="20"><text x="360" y="10">a long name of a curve</text></svg>'],
    ['in planted, under "second"', '<svg class="chart" id="planted" width="100" height="20"><text x="5" y="12">first</text><text x="9" y="13">second</text></svg>'],
  ]) {
    await page.evaluate((text) => document.querySelector('main').insertAdjacentHTML('beforeend', `<div id="fault">${text}</div>`), html);
    assert.ok((await cutOff(page)).some((found) => found.startsWith(word)), word);
    await page.evaluate(() => document.getElementById('fault').remove());
  }
  await page.context().close();
});

test('the pointer shows values, and a drag zooms', async () => {
  const page = await open(report());
  const chart = page.locator('#loss-chart'), figure = page.locator('figure').filter({has: chart}).first();
  await chart.scrollIntoViewIfNeeded();
  const box = await chart.boundingBox();
  const to = (x) => page.mouse.move(box.x + box.width * x, box.y + box.height / 2);
  await to(0.5);
  const tip = figure.locator('.tip');
  await tip.waitFor();
  assert.match(await tip.innerText(), /step\s+\d+/);
  const before = await chart.locator('.axis.x').innerHTML();
  await to(0.4);
  await page.mouse.down();
  await to(0.7);
  await page.mouse.up();
  await figure.locator('button.back').waitFor();
  assert.notEqual(await chart.locator('.axis.x').innerHTML(), before);
  await figure.locator('button.back').click();
  await figure.locator('button.back').waitFor({state: 'hidden'});
  await page.mouse.move(2, 2);
  assertQuiet(page, 'file:');
  await page.context().close();
});

test('keys do the same, and what they find is announced', async () => {
  const page = await open(report());
  const chart = page.locator('#loss-chart'), voice = page.locator('#voice');
  await chart.focus();
  await page.keyboard.press('Home');
  await voice.filter({hasText: /^step 0: /}).waitFor({state: 'attached'});
  await page.keyboard.press('ArrowRight');
  await voice.filter({hasText: /^step [1-9]/}).waitFor({state: 'attached'});
  await page.keyboard.press('End');
  await voice.filter({hasText: /^step 159: /}).waitFor({state: 'attached'});
  const plot = chart.locator('g.plot'), whole = await plot.getAttribute('transform');
  await page.keyboard.press('+');
  assert.notEqual(await plot.getAttribute('transform'), whole);
  await page.keyboard.press('Escape');
  assert.equal(await plot.getAttribute('transform'), whole);
  // By the tab key alone one gets to the first chart, and out of it again.
  await page.evaluate(() => document.activeElement.blur());
  const seen = new Set();
  for (let n = 0; n < 200 && !seen.has('chart'); ++n) {
    await page.keyboard.press('Tab');
    seen.add(await page.evaluate(() => document.activeElement.classList[0] ?? document.activeElement.localName));
  }
  assert.ok(seen.has('chart'), [...seen].join(' '));
  assertQuiet(page, 'file:');
  await page.context().close();
});

const brightness = (page) => page.evaluate(() => {
  const canvas = document.createElement('canvas').getContext('2d');
  canvas.fillStyle = getComputedStyle(document.body).backgroundColor;
  canvas.fillRect(0, 0, 1, 1);
  const [r, g, b] = canvas.getImageData(0, 0, 1, 1).data;
  return (0.2126 * r + 0.7152 * g + 0.0722 * b) / 255;
});

test('light and dark, as the system has it and by the button', async () => {
  for (const colorScheme of ['light', 'dark']) {
    const page = await open(report(), {colorScheme});
    const first = await brightness(page);
    assert.equal(first > 0.5, colorScheme === 'light');
    await page.locator('#theme').click();
    await page.waitForFunction((was) => {
      const [r] = getComputedStyle(document.body).backgroundColor.match(/[\d.]+/g).map(Number);
      return (r > 127) !== (was > 0.5);
    }, first);
    await page.locator('#theme').click();
    assertQuiet(page, 'file:');
    await page.context().close();
  }
});

// A picture as a grid of brightness.
async function grid(page, bytes) {
  return page.evaluate(async ([data, across, down]) => {
    const image = new Image();
    image.src = `data:image/png;base64,${data}`;
    await image.decode();
    const canvas = document.createElement('canvas');
    [canvas.width, canvas.height] = [image.width, image.height];
    const context = canvas.getContext('2d', {willReadFrequently: true});
    context.drawImage(image, 0, 0);
    const {data: pixels} = context.getImageData(0, 0, image.width, image.height);
    const sums = Array.from({length: across * down}, () => [0, 0]);
    for (let y = 0; y < image.height; ++y)
      for (let x = 0; x < image.width; ++x) {
        const p = 4 * (y * image.width + x);
        const cell = sums[Math.floor(y * down / image.height) * across + Math.floor(x * across / image.width)];
        cell[0] += (0.2126 * pixels[p] + 0.7152 * pixels[p + 1] + 0.0722 * pixels[p + 2]) / 255;
        cell[1] += 1;
      }
    return sums.map(([sum, count]) => Math.round(100 * sum / count) / 100);
  }, [bytes.toString('base64'), columns, rows]);
}

test('it looks as it did, roughly', async () => {
  const painter = await open('about:blank');
  const found = {};
  for (const colorScheme of ['light', 'dark']) {
    const page = await open(report(), {colorScheme});
    for (const [name, target] of [['top', page], ['first chart', page.locator('#loss-chart')]]) {
      const cells = await grid(painter, await target.screenshot());
      assert.ok(Math.max(...cells) - Math.min(...cells) > 0.03, `${name}: blank`);
      found[`${colorScheme} ${name}`] = cells;
    }
    await page.context().close();
  }
  if (process.env.EVENKEEL_UPDATE) {
    const lines = Object.entries(found).map(([name, cells]) => ` ${JSON.stringify(name)}: ${JSON.stringify(cells)}`);
    fs.writeFileSync(path.join(here, 'looks.json'), `{\n${lines.join(',\n')}\n}\n`);
    return;
  }
  for (const [name, cells] of Object.entries(found)) {
    assert.ok(looks[name], `${name}: not in looks.json: EVENKEEL_UPDATE=1 writes it`);
    const differences = cells.map((value, n) => Math.abs(value - looks[name][n]));
    const mean = differences.reduce((sum, value) => sum + value) / cells.length, largest = Math.max(...differences);
    assert.ok(mean <= meanTolerance && largest <= cellTolerance,
      `${name}: brightness differs by ${mean.toFixed(3)} in the mean, ${largest.toFixed(2)} at most; EVENKEEL_UPDATE=1 takes the new look`);
  }
});

// The last step of the loss, which has every step. (Other charts end at the last step that has facts.)
const lastStep = (page) => page.evaluate(() => Number(document.querySelector('#loss-chart').dataset.x.split(' ')[1]));
const stepBeyond = (page, step) =>
  page.waitForFunction((than) => Number(document.querySelector('#loss-chart')?.dataset.x.split(' ')[1]) > than, step);
const state = (page, name) => page.locator(`#live[data-state=${name}]`).waitFor();

test('the live view follows a run that trains, stops and goes on; and its server', {timeout: 120_000}, async () => {
  const name = at('live');
  const settings = ['train', '--preset', 'micro', '--data', at('text.txt'), '--plan', 'fp32,row_sum=e5m2', '--steps',
    '1000000', '--facts-every', '5', '--probe-every', '20', '--checkpoint-every', '20', ...small, '--out', name];
  const trainer = start(...settings);
  await until(() => fs.existsSync(path.join(name, 'metrics.jsonl')));
  let watch = start('watch', '--port', '0', name);
  const url = await watch.firstLine;
  const page = await open(url), second = await open(url);
  await state(page, 'live');
  await stepBeyond(page, 40);

  // What the reader does stays while the page goes on.
  const chart = () => page.locator('#loss-chart');
  await chart().focus();
  for (const key of ['Home', '+']) await page.keyboard.press(key);
  const zoomed = page.locator('button.back:visible').first();
  await zoomed.waitFor();
  const focusAndPlace = () =>
    page.evaluate(() => [document.activeElement.id, Math.round(document.activeElement.getBoundingClientRect().top)]);
  await page.evaluate(() => document.activeElement.scrollIntoView({block: 'start', behavior: 'instant'}));
  const [focused, top] = await focusAndPlace();
  await page.evaluate(() => { document.getElementById('page').dataset.old = '1'; });
  await page.waitForFunction(() => !document.getElementById('page').dataset.old);
  await stepBeyond(page, await lastStep(page));
  const [stillFocused, stillThere] = await focusAndPlace();
  assert.equal(stillFocused, focused);
  assert.ok(Math.abs(stillThere - top) <= 2, `${top} px from the top of the window, then ${stillThere}`);
  assert.equal(await zoomed.isVisible(), true);
  await stepBeyond(second, 40);

  // The run ends, and goes on.
  trainer.kill('SIGINT');
  assert.equal(await trainer.ended, 0);
  const stopped = fs.readFileSync(path.join(name, 'metrics.jsonl'), 'utf8').trimEnd().split('\n').length - 1;
  await stepBeyond(page, stopped - 1);
  const again = start('train', '--resume', name);
  await stepBeyond(page, stopped + 20);
  again.kill('SIGINT');
  assert.equal(await again.ended, 0);
  for (const viewer of [page, second]) assertQuiet(viewer, url);
  await assertWhole(url, (viewer) => state(viewer, 'live'));

  // The server ends in order; viewers say so, and find another one at its place.
  watch.kill('SIGINT');
  assert.equal(await watch.ended, 0);
  await state(page, 'lost');
  watch = start('watch', '--port', new URL(url).port, name);
  assert.equal(await watch.firstLine, url);
  await state(page, 'live');
  watch.kill('SIGINT');
  assert.equal(await watch.ended, 0);
  for (const viewer of [page, second]) await viewer.context().close();
});
