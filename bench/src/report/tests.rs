use super::*;

#[test]
fn verdicts_follow_the_aim() {
    let aim = Aim::AtLeast(0.6, 0.8);
    assert_eq!([0.9, 0.7, 0.5].map(|r| aim.verdict(r)), ["met", "between", "missed"]);
    assert_eq!([1.2, 1.3].map(|r| Aim::AtMost(1.2).verdict(r)), ["met", "missed"]);
    assert_eq!(aim.verdict(f64::NAN), "missed");
}
