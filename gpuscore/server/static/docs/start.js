// Show /openapi.json. A key that is entered under "Authorize" stays in memory.
window.ui = SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  displayRequestDuration: true,
  persistAuthorization: false,
  validatorUrl: null,  // otherwise another host would be asked
});
