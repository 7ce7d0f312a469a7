"""The suites' own settings; the fixtures come with the plugin that the package registers."""
