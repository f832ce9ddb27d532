// Excerpts of search results come from the article alone, without the theme's buttons.
document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return; // this is not the page of the search
  const textOf = Search.htmlToText;
  Search.htmlToText = (html, anchor) => {
    const page = new DOMParser().parseFromString(html, "text/html");
    const article = page.querySelector("article.bd-article");
    if (article) page.querySelector('[role="main"]').replaceChildren(article);
    return textOf(page.documentElement.outerHTML, anchor);
  };
});
