// The live view: asks the server for changes and replaces <main id="page">.
