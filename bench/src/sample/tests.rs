use super::*;

#[test]
fn the_median_is_the_middle_one() {
    let mut samples = Samples::default();
    assert_eq!(samples.median(), 0.0);
    for value in [9.0, 1.0, 5.0] {
        samples.push(value);
    }
    assert_eq!((samples.median(), samples.quantile(0.0), samples.quantile(1.0)), (5.0, 1.0, 9.0));
}
