//! The description of control (`docs/reference/openapi.json`), and a server held against it.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};
use tempfile::TempDir;

use crate::{
    control::{Store, keys_of},
    rig::Rig,
};

/// Keywords that restrict nothing.
const WORDS: [&str; 2] = ["description", "operationId"];

/// A description, and what was asked of a server by it.
pub struct Description {
    document: Value,
    asked: BTreeSet<(String, String, u16)>,
}

impl Description {
    pub fn read() -> Self {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/openapi.json");
        let text = std::fs::read_to_string(path).unwrap();
        Self { document: serde_json::from_str(&text).unwrap(), asked: BTreeSet::new() }
    }

    /// Returns the path of the description that a path of a request is.
    fn path_of(&self, path: &str) -> String {
        let paths = self.document["paths"].as_object().unwrap();
        let is_it = |pattern: &&String| match pattern.split_once('{') {
            None => path == **pattern,
            Some((fixed, _)) => path.starts_with(fixed) && path.len() > fixed.len(),
        };
        // A path without a number first: `/cache/pins`.
        paths.keys().find(is_it).unwrap_or_else(|| panic!("{path} is not described")).clone()
    }

    /// Checks the body of a request or an answer, and counts the answer's status.
    pub fn check(&mut self, method: &str, path: &str, body: &str, status: u16, answer: &str) {
        let path = self.path_of(path);
        let operation = &self.document["paths"][&path][method.to_lowercase()];
        assert!(operation.is_object(), "{method} {path} is not described");
        let text = status.to_string();
        let described = &operation["responses"][&text];
        let response =
            if described.is_null() { &operation["responses"]["default"] } else { described };
        let response = match response["$ref"].as_str() {
            Some(name) => self.find(name),
            None => response,
        };
        if let Some(schema) = response["content"]["application/json"].get("schema") {
            let answer: Value = serde_json::from_str(answer).unwrap();
            self.is_valid(schema, &answer).unwrap_or_else(|why| panic!("{path}: {answer}: {why}"));
        } else {
            assert!(response["content"]["text/plain"].is_object(), "{method} {path} {status}");
        }
        if status == 200 && !body.is_empty() {
            let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
            let body: Value = serde_json::from_str(body).unwrap();
            self.is_valid(schema, &body).unwrap_or_else(|why| panic!("{path}: {body}: {why}"));
        }
        self.asked.insert((path, method.to_lowercase(), status));
    }

    /// Returns all paths, methods and statuses that are described.
    fn all(&self) -> BTreeSet<(String, String, u16)> {
        let mut all = BTreeSet::new();
        for (path, operations) in self.document["paths"].as_object().unwrap() {
            for (method, operation) in operations.as_object().unwrap() {
                let statuses = operation["responses"].as_object().unwrap().keys();
                let statuses = statuses.filter_map(|status| status.parse().ok());
                all.extend(statuses.map(|status| (path.clone(), method.clone(), status)));
            }
        }
        all
    }

    fn find(&self, reference: &str) -> &Value {
        let found = self.document.pointer(reference.strip_prefix('#').unwrap());
        found.unwrap_or_else(|| panic!("there is no {reference}"))
    }

    /// Returns the reason why a value is not of a schema. Knows the keywords that the description
    /// uses, and panics for another one.
    fn is_valid(&self, schema: &Value, value: &Value) -> Result<(), String> {
        let schema = schema.as_object().expect("a schema");
        for (word, by) in schema.iter().filter(|(word, _)| !WORDS.contains(&word.as_str())) {
            let is_right = match word.as_str() {
                "$ref" => return self.is_valid(self.find(by.as_str().unwrap()), value),
                "anyOf" => {
                    let any = by.as_array().unwrap();
                    any.iter().any(|schema| self.is_valid(schema, value).is_ok())
                }
                "type" => match by {
                    Value::Array(kinds) => kinds.iter().any(|kind| is_of(value, kind)),
                    kind => is_of(value, kind),
                },
                "enum" => by.as_array().unwrap().contains(value),
                "minimum" => value.as_f64().is_none_or(|value| value >= by.as_f64().unwrap()),
                "pattern" => {
                    assert_eq!(by, "^[0-9a-fA-F]{64}$", "the only one");
                    let text = value.as_str().unwrap_or_default();
                    text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
                }
                "items" => {
                    let mut items = value.as_array().into_iter().flatten();
                    items.try_for_each(|item| self.is_valid(by, item))?;
                    true
                }
                "required" => {
                    let has = |name: &Value| value.get(name.as_str().unwrap()).is_some();
                    by.as_array().unwrap().iter().all(has)
                }
                "properties" => {
                    for (name, schema) in by.as_object().unwrap() {
                        let field = value.get(name);
                        field.map_or(Ok(()), |field| self.is_valid(schema, field))?;
                    }
                    true
                }
                "additionalProperties" => {
                    assert_eq!(by, false, "the only one");
                    let known = schema["properties"].as_object().unwrap();
                    let none = Map::new();
                    value.as_object().unwrap_or(&none).keys().all(|name| known.contains_key(name))
                }
                other => panic!("a keyword that this test does not know: {other}"),
            };
            if !is_right {
                return Err(format!("{word} {by} is not so of {value}"));
            }
        }
        Ok(())
    }
}

fn is_of(value: &Value, kind: &Value) -> bool {
    match kind.as_str().unwrap() {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "integer" => value.is_u64(),
        other => panic!("a type that this test does not know: {other}"),
    }
}

#[test]
fn the_check_of_schemas_finds_what_is_wrong() {
    let description = Description::read();
    let schema = |name: &str| json!({"$ref": format!("#/components/schemas/{name}")});
    let pin = json!({"pin": 1, "namespace": 0, "blocks": 2, "awaited_blocks": 0, "bytes": 8,
        "ends_in_s": 5});
    let whole = json!({"outcome": "accepted", "reason": null, "pin": pin});
    assert_eq!(description.is_valid(&schema("PinAnswer"), &whole), Ok(()));
    for (at, wrong) in [
        ("/outcome", json!("perhaps")),
        ("/reason", json!(7)),
        ("/pin/blocks", json!(-1)),
        ("/pin/bytes", json!("8")),
        ("/pin", json!({"pin": 1})),
        ("/pin", json!([])),
    ] {
        let mut other = whole.clone();
        *other.pointer_mut(at).unwrap() = wrong;
        assert!(description.is_valid(&schema("PinAnswer"), &other).is_err(), "{other}");
    }
    let mut more = whole.clone();
    more["more"] = json!(1);
    assert!(description.is_valid(&schema("PinAnswer"), &more).is_err());
    assert!(description.is_valid(&schema("Key"), &json!("ab")).is_err());
}

/// Asks for every path, with every status that it has.
#[test]
fn a_server_is_as_it_is_described() {
    let rig = Rig::reloading();
    let mut store = Store::new(&rig);
    let (mine, none, keys) = (store.fill("mine", 0..4), 4_000_000_u32, keys_of(0..6));
    let named = json!({"namespace": mine, "keys": keys});
    let nowhere = json!({"namespace": none, "keys": keys});
    let bad = json!({"namespace": "mine"});
    let mut pin = named.clone();
    pin["ttl_s"] = json!(60);
    let mut far = nowhere.clone();
    far["ttl_s"] = json!(60);
    let hint = |kind: &str, payload: &Value| {
        json!({"action_id": kind, "action_type": kind, "action_version": "1.0",
            "payload": payload})
    };
    let hints = json!({"protocol_version": "0.1", "message_id": "7",
        "actions": [hint("kv.pin", &pin), hint("kv.pin", &far), hint("kv.demote", &named)]});
    let quota = |namespace: u32| format!("/quota/{namespace}");
    let asked = [
        ("GET", "/status", &json!(null), 200),
        ("GET", "/metrics", &json!(null), 200),
        ("POST", "/directory/lookup", &named, 200),
        ("POST", "/directory/lookup", &nowhere, 404),
        ("POST", "/directory/lookup", &bad, 400),
        ("POST", "/cache/pins", &pin, 200),
        ("POST", "/cache/pins", &far, 404),
        ("POST", "/cache/pins", &named, 400),
        ("GET", "/cache/pins", &json!(null), 200),
        ("GET", "/status", &json!(null), 200),
        ("DELETE", "/cache/pins/1", &json!(null), 200),
        ("DELETE", "/cache/pins/1", &json!(null), 404),
        ("POST", "/cache/prefetches", &named, 501),
        ("POST", "/cache/checksums", &named, 200),
        ("POST", "/cache/checksums", &nowhere, 404),
        ("POST", "/cache/checksums", &bad, 400),
        ("GET", &quota(mine), &json!(null), 200),
        ("GET", &quota(none), &json!(null), 404),
        ("PUT", &quota(mine), &json!({"bytes": 1 << 20}), 200),
        ("PUT", &quota(mine), &json!({"bytes": null}), 200),
        ("PUT", &quota(mine), &json!({}), 400),
        ("PUT", &quota(none), &json!({"bytes": 1}), 404),
        ("POST", "/hints", &hints, 200),
        ("POST", "/hints", &json!({}), 400),
        ("POST", "/cache/clear", &json!({"namespace": mine, "unused": true}), 409),
        ("POST", "/cache/delete", &named, 200),
        ("POST", "/cache/delete", &nowhere, 404),
        ("POST", "/cache/delete", &bad, 400),
        ("POST", "/cache/clear", &json!({"namespace": mine}), 200),
        ("POST", "/cache/clear", &json!({"namespace": none}), 404),
        ("POST", "/cache/clear", &named, 400),
        ("POST", "/cache/erase", &json!({"first": 0}), 200),
        ("POST", "/cache/erase", &named, 400),
        ("POST", "/reload", &json!(null), 200),
    ];
    for (method, path, body, status) in asked {
        store.expect(method, path, body, status);
    }
    rig.break_configuration();
    store.expect("POST", "/reload", &json!(null), 409);
    // A path's other methods are not described, and have an answer.
    assert_eq!(store.ask("PATCH", "/status", "").0, 405);
    assert_eq!(store.ask("GET", "/nowhere", "").0, 404);
    let mut description = store.description;
    ask_others(&mut description, &nowhere, &bad);
    assert_eq!(description.asked, description.all());
}

/// Asks a server without a configuration, and one with a DRAM cache.
fn ask_others(description: &mut Description, nowhere: &Value, bad: &Value) {
    let rig = Rig::new();
    let mut unconfigured = Store::new(&rig);
    unconfigured.expect("POST", "/reload", &json!(null), 501);
    let rig = Rig::with_dram(TempDir::new().unwrap(), 1 << 20);
    let mut caching = Store::new(&rig);
    let named = json!({"namespace": caching.fill("mine", 0..4), "keys": keys_of(0..6)});
    for (body, status) in [(&named, 200), (nowhere, 404), (bad, 400)] {
        caching.expect("POST", "/cache/prefetches", body, status);
    }
    description.asked.extend(caching.description.asked);
    description.asked.extend(unconfigured.description.asked);
}
