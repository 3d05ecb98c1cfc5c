// Browsers start no worker from a file. Under file:// its script runs in a hidden frame of the page in its place.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      const load = (address) =>
        new Promise((done, failed) => {
          const script = inside.document.createElement("script");
          Object.assign(script, { src: new URL(address, document.baseURI).href, onload: done, onerror: failed });
          inside.document.body.append(script);
        });
      inside.importScripts = (...addresses) => addresses.reduce((before, one) => before.then(() => load(one)), Promise.resolve());
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        this.onmessage?.(event);
      };
      this.send = (data) => inside.dispatchEvent(new inside.MessageEvent("message", { data }));
      this.ready = load(url);
      this.terminate = () => frame.remove();
    }
    postMessage(data) {
      this.ready.then(() => this.send(data));
    }
  };
}
