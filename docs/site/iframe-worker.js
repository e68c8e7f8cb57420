// Browsers start no workers for pages that are opened as files: there the one that searches is a
// script in a hidden frame. The theme would load such a file from elsewhere.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.body.appendChild(document.createElement("iframe"));
      frame.hidden = true;
      frame.contentDocument.open();
      frame.contentDocument.close();
      const inside = frame.contentWindow;
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = frame.contentDocument.createElement("script");
      script.src = url;
      const loaded = new Promise(resolve => script.addEventListener("load", resolve));
      frame.contentDocument.body.append(script);
      this.postMessage = data =>
        loaded.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }
  };
}
