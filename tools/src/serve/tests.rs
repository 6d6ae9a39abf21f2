use ripieno_stack::DeviceChoice;

use super::*;

const STORE: &str = "path = \"/var/lib/ripieno/store\"\ncapacity = \"100GiB\"\ndevices = 2";

const GOOD: &str = r#"
socket = "/run/ripieno/ripieno.sock"
users = [1001]
clients = 8
pool_max = "2GiB"

[[limit]]
user = 1001
bandwidth = "1GiB"

[pins]
bytes = "10GiB"
ttl_max = 3600

[store]
path = "/var/lib/ripieno/store"
capacity = "100GiB"
devices = 2

[shape]
layers = 32
segments = 2
object_bytes = 32768
block_tokens = 16
"#;

fn reread(from: &str, to: &str) -> Result<Settings, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ripieno.toml");
    std::fs::write(&path, GOOD.replace(from, to)).unwrap();
    plan(GOOD).unwrap().fixed.read_again(&path)
}

fn plan(text: &str) -> Result<Plan, Problem> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ripieno.toml");
    std::fs::write(&path, text).unwrap();
    Plan::read(&path)
}

#[test]
fn a_configuration_is_taken_as_it_is() {
    let Plan { fixed, settings } = plan(GOOD).unwrap();
    assert_eq!((fixed.socket.to_str(), fixed.http), (Some("/run/ripieno/ripieno.sock"), None));
    let Settings { users, sessions_max, pool_bytes_max, limits, hold_max, pins, token } = settings;
    assert_eq!((users, sessions_max, pool_bytes_max), (vec![1001], 8, 2 << 30));
    let bandwidth = NonZeroU64::new(1 << 30);
    let limit = UserLimits { bandwidth, ..UserLimits::default() };
    assert_eq!((limits, hold_max.as_secs()), (BTreeMap::from([(1001, limit)]), 600));
    assert_eq!((pins.bytes, pins.ttl.as_secs(), token), (Some(10 << 30), 3600, None));
    assert_eq!(fixed.store.pacing, None);
    let short = GOOD.replace("users = [1001]\nclients = 8\npool_max = \"2GiB\"\n", "");
    let short = short.replace("[pins]\nbytes = \"10GiB\"\nttl_max = 3600\n", "");
    let Settings { users, sessions_max, pins, .. } = plan(&short).unwrap().settings;
    assert_eq!((users, sessions_max, pins), (Vec::new(), 64, PinLimits::default()));
}

#[test]
fn a_user_has_limits_of_all_kinds() {
    let all = "clients = 2\nnamespaces = 3\nstored = \"4KiB\"\nheld = \"5KiB\"\npins = \"6KiB\"\n\
               memory = \"7KiB\"";
    let with = |keys: &str| plan(&GOOD.replace("bandwidth = \"1GiB\"", keys));
    let limits = UserLimits {
        clients: Some(2),
        namespaces: Some(3),
        stored_bytes: Some(4 << 10),
        held_bytes: Some(5 << 10),
        pinned_bytes: Some(6 << 10),
        memory_bytes: Some(7 << 10),
        bandwidth: None,
    };
    assert_eq!(with(all).unwrap().settings.limits, BTreeMap::from([(1001, limits)]));
    for (keys, why) in [
        ("", "user 1001 has none"),
        ("bandwidth = \"0\"", "more than 0 bytes a second"),
        ("held = \"much\"", "held of user 1001"),
    ] {
        let error = with(keys).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
    let hold = |text: &str| plan(&GOOD.replace("clients = 8", text));
    assert_eq!(hold("hold_max = 5").unwrap().settings.hold_max.as_secs(), 5);
    assert!(hold("hold_max = 0").unwrap_err().to_string().contains("hold_max"));
}

#[test]
fn pacing_is_true_or_false() {
    let with =
        |pacing: &str| plan(&GOOD.replace("[shape]", &format!("pacing = {pacing}\n[shape]")));
    assert_eq!(with("true").unwrap().fixed.store.pacing, Some(true));
    assert_eq!(with("false").unwrap().fixed.store.pacing, Some(false));
    assert!(with("1").unwrap_err().to_string().contains("ripieno.toml"));
}

#[test]
fn drives_are_named_by_their_addresses() {
    let drives = "devices = [\"vfio:0000:65:00.0\", \"vfio:66:00.0\"]";
    let store = plan(&GOOD.replace(STORE, drives)).unwrap().fixed.store;
    let Some(DeviceChoice::Drives(addresses)) = store.devices else { panic!("{store:?}") };
    let names: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    assert_eq!(names, ["vfio:0000:65:00.0", "vfio:0000:66:00.0"]);
}

#[test]
fn only_settings_change_while_it_serves() {
    assert_eq!(reread("clients = 8", "clients = 9").unwrap().sessions_max, 9);
    assert_eq!(reread("10GiB", "1GiB").unwrap().pins.bytes, Some(1 << 30));
    for (from, to, name) in [
        ("ripieno.sock", "other.sock", "socket"),
        ("\"100GiB\"", "\"101GiB\"", "store"),
        ("devices = 2", "devices = 2\npacing = true", "store"),
        ("layers = 32", "layers = 31", "shape"),
        ("clients = 8", "clients = 0", "clients"),
    ] {
        let why = reread(from, to).unwrap_err();
        assert!(why.contains(name) && why.contains("ripieno.toml"), "{why}");
    }
}

#[test]
fn a_port_needs_a_token_that_others_cannot_read() {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("token");
    let set = |text: &str, mode| {
        std::fs::write(&file, text).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
        let http = format!("[http]\naddress = \"0.0.0.0:9500\"\ntoken_file = {file:?}\n[store]");
        plan(&GOOD.replace("[store]", &http))
    };
    let Plan { fixed, settings } = set("0123456789abcdef\n", 0o640).unwrap();
    assert_eq!(settings.token.as_deref(), Some("0123456789abcdef"));
    assert_eq!(fixed.http, Some(([0, 0, 0, 0], 9500).into()));
    for (text, mode, why) in [
        ("0123456789abcdef", 0o644, "everybody has access"),
        ("0123456789abcde", 0o600, "16 to 1024"),
        ("0123456789 abcdef", 0o600, "without blanks"),
        ("", 0o600, "16 to 1024"),
        ("", 0o600, "make one that only this user may read"),
    ] {
        let error = set(text, mode).unwrap_err().to_string();
        assert!(error.contains(why) && !error.contains("0123456789"), "{error}");
    }
    let none = GOOD.replace("[store]", "[http]\naddress = \"127.0.0.1:9500\"\n[store]");
    assert!(plan(&none).unwrap_err().to_string().contains("token_file"));
}

#[test]
fn the_shipped_configuration_is_valid() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../objstore/serve/systemd/ripieno.toml");
    let fixed = Plan::read(&path).unwrap().fixed;
    assert_eq!(fixed.socket, Path::new("/run/ripieno/ripieno.sock"), "the unit's directory");
    // Keys behind a # are valid, too, and none is missing.
    let keys = EXAMPLE.lines().map(|line| match line.strip_prefix("# ") {
        Some(key) if key.starts_with("[") || key.contains(" = ") => key,
        _ => line,
    });
    let all: String =
        keys.filter(|it| *it != "devices = 2").map(|it| it.to_owned() + "\n").collect();
    let config: Config = basic_toml::from_str(&all).unwrap();
    assert!(config.http.is_some() && config.pins.bytes.is_some() && config.store.dram.is_some());
    let LimitConfig { clients, namespaces, stored, held, pins, memory, bandwidth, .. } =
        &config.limit[0];
    assert!(clients.is_some() && namespaces.is_some());
    assert!([stored, held, pins, memory, bandwidth].iter().all(|it| it.is_some()), "{config:?}");
    for key in ["users", "clients", "pool_max", "hold_max"] {
        assert!(EXAMPLE.contains(&format!("\n{key} = ")), "{key}");
    }
}

#[test]
fn a_wrong_configuration_is_named() {
    for (from, to, why) in [
        ("clients = 8", "clients = 0", "at least one"),
        ("clients = 8", "client = 8", "client"),
        ("\"2GiB\"", "\"2 apples\"", "pool_max"),
        ("\"100GiB\"", "\"\"", "capacity"),
        ("\"1GiB\"", "\"0\"", "more than 0 bytes"),
        ("\"10GiB\"", "\"x\"", "pins.bytes"),
        ("ttl_max = 3600", "ttl_max = 0", "pins.ttl_max"),
        ("layers = 32", "layers = 0", "shape"),
        (
            "devices = 2",
            "devices = [\"vfio:65:00.0\"]",
            "store.devices: a store has a directory or",
        ),
        ("path = \"/var/lib/ripieno/store\"", "", "store.path: it is missing"),
        ("devices = 2", "devices = \"nvme0\"", "devices: \"nvme0\" was given"),
        (
            "devices = 2",
            "drives = [\"65:00.0\"]",
            "drives: there is no such option; its name is devices",
        ),
        ("devices = 2", "device = 2", "device: there is no such option; its name is devices"),
        ("devices = 2", "executor = \"cuda\"", "store.executor: a server has threads"),
        (STORE, "devices = \"vfio:65:00.0\"\ncapacity = \"1GiB\"", "ripieno format"),
        ("[shape]", "[shapes]", "shape"),
        ("users = [1001]", "users = [\"alice\"]", "users"),
    ] {
        let error = plan(&GOOD.replace(from, to)).unwrap_err().to_string();
        assert!(error.contains(why) && error.contains("ripieno.toml"), "{to}: {error}");
    }
    let missing = Plan::read(Path::new("/nowhere/ripieno.toml")).unwrap_err();
    assert!(missing.to_string().contains("/nowhere/ripieno.toml"), "{missing}");
    assert!(missing.hint().contains("--print-config prints one to begin with"), "{missing:?}");
}

#[test]
fn an_error_of_a_configuration_has_its_line_and_a_person_s_words() {
    const NUMBER: &str = "expected a whole number from 0 to 4294967295";
    let limits = "[[limit]]\nuser = 1001\nbandwidth = \"1GiB\"";
    let two = &format!("{limits}\n[[limit]]\nuser = 7\nclients = \"x\"");
    for (from, to, why, hint) in [
        ("socket", "sokcet", "line 2: unknown field `sokcet`", HINT),
        ("[store]", "[stor]", "line 15: unknown field `stor`", HINT),
        ("ttl_max", "ttlmax", "line 13: pins: unknown field `ttlmax`", HINT),
        ("100GiB", "100GaB", "line 17: store.capacity: \"100GaB\" was given", ""),
        ("devices = 2", "queues = 65", "line 18: store.queues: \"65\" was given", ""),
        ("devices = 2", "path = \"x\"", "line 18: store: duplicate key: `path`", HINT),
        ("\nlayers = 32", "", "line 20: shape: missing field `layers`", HINT),
        ("socket = \"/run/ripieno/ripieno.sock\"", "", "toml: missing field `socket`", HINT),
        ("= 32\nseg", "= \"four\"\nseg", NUMBER, HINT),
        (
            "[1001]",
            "[\"root\"]",
            &format!("line 3: users: invalid type: string \"root\", {NUMBER}"),
            HINT,
        ),
        ("[1001]", "1001", "line 3: users: invalid type: integer `1001`, expected a list", HINT),
        (
            limits,
            two,
            &format!("line 12: limit.clients: invalid type: string \"x\", {NUMBER}"),
            HINT,
        ),
        ("[[limit]]", "[limit]", "line 7: [limit]: write [[limit]]", ""),
        ("[store]", "[[store]]", "line 15: [[store]]: write [store]", ""),
        ("[shape]", "[[shape]]", "line 20: [[shape]]: write [shape]", ""),
        ("clients = 8", "clients = 0", "clients: at least one is needed", ""),
        (
            "[store]",
            "[http]\naddress = \"::1\"\n[store]",
            "line 16: http.address: \"::1\": give",
            "",
        ),
        ("clients = 8", "clients = 8x", "line 4: invalid number", HINT),
    ] {
        let text = GOOD.replacen(from, to, 1);
        assert_ne!(text, GOOD, "{from}");
        let error = plan(&text).unwrap_err();
        assert!(error.to_string().contains(why), "{to}: {error}");
        assert_eq!(error.hint(), hint, "{to}: {error}");
    }
}
