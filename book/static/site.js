// What the theme and the widgets leave out: names for sliders, keyboard scrolling, icons that stay buttons.
(function () {
  "use strict";

  // The theme turns <i> icons into pictures; nested inside the <i>, they leave a widget's play button working.
  window.FontAwesomeConfig = Object.assign({ autoReplaceSvg: "nest" }, window.FontAwesomeConfig);

  function set(element, name, value) {
    if (value && element.getAttribute(name) !== value) element.setAttribute(name, value);
  }

  function nameSliders() {
    document.querySelectorAll(".noUi-handle").forEach(function (handle) {
      var row = handle.closest(".widget-inline-hbox");
      var label = row && row.querySelector(".widget-label");
      var readout = row && row.querySelector(".widget-readout");
      set(handle, "aria-label", label && label.textContent);
      set(handle, "aria-valuetext", readout && readout.textContent);
    });
    var names = { play: "Play", pause: "Pause", stop: "Stop", retweet: "Repeat" };
    document.querySelectorAll(".jupyter-button").forEach(function (button) {
      var icon = button.querySelector("i, svg");
      var found = icon && Object.keys(names).find(function (name) {
        return icon.classList.contains("fa-" + name);
      });
      if (found && !button.textContent.trim()) set(button, "aria-label", names[found]);
    });
  }

  // A name that hides the words one sees cannot be spoken to a voice control: the words are the better name.
  function nameByWords() {
    document.querySelectorAll("button[aria-label], a[aria-label], summary[aria-label]").forEach(function (element) {
      var words = element.innerText.trim().replace(/\s+/g, " ").toLowerCase();
      if (words && !element.getAttribute("aria-label").toLowerCase().includes(words)) {
        element.removeAttribute("aria-label");
      }
    });
  }

  // An icon in a button that has a name of its own says nothing more.
  function quietIcons() {
    document.querySelectorAll("button[aria-label] svg, button[aria-label] i").forEach(function (icon) {
      var title = icon.querySelector("title");
      if (title) title.remove();
      icon.removeAttribute("aria-labelledby");
      icon.setAttribute("aria-hidden", "true");
    });
  }

  // The widgets ask for formulas in the way of MathJax 2; the page has MathJax 3.
  function bridgeMathJax() {
    if (window.MathJax && !window.MathJax.Hub) {
      window.MathJax.Hub = {
        Queue: function (call) { if (window.MathJax.typesetPromise) window.MathJax.typesetPromise([call[2]]); }
      };
    }
  }

  // Whatever scrolls sideways can be scrolled from the keyboard.
  function reachScrollers() {
    document.querySelectorAll("pre, .cell_output, .cell_output .widget-html-content, .bd-article table, " +
        ".pst-scrollable-table-container, mjx-container[display]").forEach(function (element) {
      if (element.scrollWidth > element.clientWidth) set(element, "tabindex", "0");
    });
  }

  // The theme and the widgets write when they like: look again after every change, once a frame.
  var waiting = false;
  function settle() {
    waiting = false;
    nameSliders();
    nameByWords();
    quietIcons();
    reachScrollers();
  }
  function soon() {
    if (!waiting) { waiting = true; window.requestAnimationFrame(settle); }
  }

  function start() {
    bridgeMathJax();
    settle();
    new MutationObserver(soon).observe(document.body,
      { childList: true, subtree: true, characterData: true, attributeFilter: ["class", "aria-label"] });
    window.addEventListener("load", soon);
    window.addEventListener("resize", soon);
  }
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
