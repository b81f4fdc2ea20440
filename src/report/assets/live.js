// The live view: hears from the server (/events) that the page is another, and puts its new <main id="page"> in the place
// of the old one. What the reader does stays as it is: where the page is scrolled to, what has the focus, what is opened,
// selected or zoomed. A corner of the window says whether the server is heard.
(() => {
  'use strict';

  const corner = document.createElement('div');
  corner.id = 'live';
  const style = document.createElement('style');
  style.textContent = `
    #live { position: fixed; right: .75rem; bottom: .75rem; padding: .15rem .6rem; font: .8rem/1.5 system-ui, sans-serif;
            color: CanvasText; background: Canvas; border: 1px solid GrayText; border-radius: 1rem; z-index: 10; }
    #live::before { content: '\\25CF\\A0'; color: #b45309; }
    #live[data-state=live]::before { color: #15803d; }
    @media print { #live { display: none; } }`;
  const words = document.createElement('span');
  words.setAttribute('role', 'status');  // screen readers announce it; not the times
  const time = document.createElement('span');
  time.setAttribute('aria-hidden', 'true');
  corner.append(words, time);
  document.head.append(style);
  document.body.append(corner);

  const sayings = {connecting: 'connecting', live: 'live', lost: 'no connection, trying again', failed: 'not drawn'};
  function say(state, title = '') {
    corner.title = title;
    if (corner.dataset.state === state) return;
    corner.dataset.state = state;
    words.textContent = sayings[state];
  }

  // An element's place within main, to be found again in another main: by its id, else by counting.
  function placeOf(element, main) {
    const steps = [];
    for (let at = element; at && at !== main; at = at.parentElement) {
      if (at.id) return [`#${CSS.escape(at.id)}`, ...steps].join(' > ');
      const alike = [...at.parentElement.children].filter((other) => other.localName === at.localName);
      steps.unshift(`${CSS.escape(at.localName)}:nth-of-type(${alike.indexOf(at) + 1})`);
    }
    return [':scope', ...steps].join(' > ');
  }

  // What the reader did to the page; the answer does it to another one.
  function remember(main) {
    const focused = main.contains(document.activeElement) ? placeOf(document.activeElement, main) : null;
    const details = [...main.querySelectorAll('details')].map((d) => [placeOf(d, main), d.open]);
    // Contents above the reader may grow: what is nearest to the top of the window stays where it is.
    const distance = (element) => Math.abs(element.getBoundingClientRect().top);
    const anchor = [...main.querySelectorAll(':is(section, figure, h2, h3, p, svg)[id]')]
        .reduce((best, element) => (best && distance(best) <= distance(element) ? best : element), null);
    const top = anchor?.getBoundingClientRect().top;
    const [x, y] = [scrollX, scrollY];
    return (fresh) => {
      for (const [place, open] of details) {
        const found = fresh.querySelector(place);
        if (found) found.open = open;
      }
      evenkeelPage.attach();  // with the zooms of before
      scrollTo({left: x, top: y, behavior: 'instant'});
      const again = y > 0 && anchor && document.getElementById(anchor.id);
      if (again) scrollBy({top: again.getBoundingClientRect().top - top, behavior: 'instant'});
      if (focused) fresh.querySelector(focused)?.focus({preventScroll: true});
      // The pointer has not moved, but what is under it is new.
      if (pointer)
        document.elementFromPoint(pointer.clientX, pointer.clientY)
            ?.dispatchEvent(new PointerEvent('pointermove', {...pointer, bubbles: true}));
    };
  }

  let pointer = null, pressed = false;
  addEventListener('pointermove', ({clientX, clientY}) => { pointer = {clientX, clientY}; }, true);
  document.addEventListener('pointerleave', () => { pointer = null; });
  addEventListener('pointerdown', () => { pressed = true; }, true);
  for (const name of ['pointerup', 'pointercancel'])
    addEventListener(name, () => { pressed = false; setTimeout(catchUp); });

  let shown = null, wanted = null, busy = false;  // tags of pages
  const catchUp = () => wanted !== shown && refresh();
  const selects = () => getSelection()?.isCollapsed === false;

  async function refresh() {
    if (busy || document.hidden || pressed || selects()) return;  // in the middle of something: later
    busy = true;
    try {
      while (wanted !== shown) {
        const target = wanted;
        const answer = await fetch('/', {cache: 'no-cache'});
        const text = await answer.text();
        shown = answer.headers.get('ETag')?.replaceAll('"', '') ?? target;
        if (!answer.ok) {
          say('failed', text);
          if (wanted === target) break;
          continue;
        }
        const fresh = document.adoptNode(
            new DOMParser().parseFromString(text, 'text/html').getElementById('page'));
        const old = document.getElementById('page');
        const restore = remember(old);
        old.replaceWith(fresh);
        restore(fresh);
        time.textContent = `, ${new Date().toLocaleTimeString()}`;
        say('live');
        document.dispatchEvent(new Event('evenkeel:updated'));
        if (wanted === target) break;  // the page had moved on further than the event: its own event follows
      }
    } catch {
      shown = null;  // the server went away in the middle: asked again when it is heard
    } finally {
      busy = false;
    }
  }

  say('connecting');
  const events = new EventSource('/events');
  events.addEventListener('open', () => say('live'));
  events.addEventListener('error', () => say('lost'));
  events.addEventListener('page', (event) => {
    wanted = event.data;
    refresh();
  });
  for (const name of ['visibilitychange', 'selectionchange'])
    document.addEventListener(name, catchUp);
})();
