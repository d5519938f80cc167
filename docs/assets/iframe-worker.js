// Browsers start no worker for pages that are read from disk (file://). There the search runs in a hidden frame.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      const inside = frame.contentWindow;
      inside.importScripts = (...urls) =>
        urls.reduce((before, each) => before.then(() => load(frame, each)), Promise.resolve());
      inside.postMessage = (data) => {
        const message = new MessageEvent("message", { data });
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      };
      this.inside = inside;
      this.ready = load(frame, url);
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.inside.frameElement.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}

function load(frame, url) {
  return new Promise((resolve, reject) => {
    const script = frame.contentDocument.createElement("script");
    script.src = url;
    script.onload = resolve;
    script.onerror = reject;
    frame.contentDocument.head.append(script);
  });
}
