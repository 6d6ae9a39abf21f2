use super::*;

const MS: Duration = Duration::from_millis(1);

#[test]
fn between_points_and_beyond_them() {
    let curve = Curve::new(&[(1000, MS), (3000, 2 * MS), (4000, 4 * MS)]).unwrap();
    for (bytes, micros) in [(0, 0), (500, 750), (2000, 1500), (3500, 3000), (5000, 6000)] {
        assert_eq!(curve.duration(bytes).as_micros(), micros, "{bytes}");
    }
}

#[test]
fn a_latency_and_a_bandwidth() {
    let curve = Curve::line(Duration::from_micros(80), 7e9).unwrap();
    let micros = curve.duration(7_000_000).as_micros();
    assert!((1079..=1080).contains(&micros), "{micros}");
}

#[test]
fn it_follows_slower_devices_and_not_a_single_hiccup() {
    let mut curve = Curve::line(Duration::from_micros(80), 7e9).unwrap();
    let alone = curve.duration(1 << 20);
    curve.learn(1 << 20, alone * 1000);
    assert!(curve.duration(1 << 20) < alone * 12 / 10);
    (0..100).for_each(|_| curve.learn(1 << 20, alone * 3));
    let slower = curve.duration(1 << 20).as_secs_f64() / alone.as_secs_f64();
    assert!((2.9..3.1).contains(&slower), "{slower}");
}

#[test]
fn what_is_no_curve_is_refused() {
    for points in [&[][..], &[(2, MS), (1, MS)], &[(1, 2 * MS), (2, MS)], &[(0, MS)]] {
        assert!(Curve::new(points).is_err(), "{points:?}");
    }
    assert!(Curve::line(MS, 0.0).is_err());
}
