// Browsers do not let a page that is opened from disk search: without this line the search box would wait forever
if (location.protocol === "file:") document.documentElement.classList.add("from-disk")
