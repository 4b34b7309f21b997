// Starts Swagger UI on the document that this API serves.
window.ui = SwaggerUIBundle({
  url: "/schema/openapi.json",
  dom_id: "#swagger",
  deepLinking: true,
  docExpansion: "list",
  defaultModelsExpandDepth: 0,
  validatorUrl: null, // the default sends the document's address to another host
});
