use super::*;

#[test]
fn memory_of_another_function_is_named_by_its_bar() {
    assert_eq!(memory("peer:0000:00:05.0/2").unwrap().to_string(), "peer:0000:00:05.0/2");
}
