"""Names under which users of other toolkits know treeward's classes, one module a toolkit; nothing
here is imported."""
