use super::*;
use crate::problem::unfit;

fn finding(route: Route, verdict: Verdict) -> Finding {
    Finding::new(route.name(), "a route").about(route).says(verdict, "as it is")
}

#[test]
fn a_route_works_when_one_executor_can_take_it() {
    let findings = [
        finding(Route::Direct, Verdict::Fails),
        finding(Route::Host, Verdict::Fails),
        finding(Route::Host, Verdict::Works),
        finding(Route::Staged, Verdict::Limited),
        Finding::new("gpu", "GPU").says(Verdict::Works, "no route"),
    ];
    assert_eq!(works(&findings), ["staged", "host"]);
    assert!(works(&[finding(Route::Direct, Verdict::Skipped)]).is_empty());
}

#[test]
fn what_would_help_is_shown_with_what_is_wrong() {
    let error = unfit("no way there", "build one").context("walking");
    let finding = Finding::new("x", "X").fails(&error);
    assert_eq!(finding.verdict, Verdict::Fails);
    assert_eq!(finding.row(), ["X", "FAILS", "walking: no way there\nmend: build one"]);
    let bare = Finding::new("x", "X").fails(&anyhow::anyhow!("broken"));
    assert_eq!((bare.found.as_str(), bare.mend), ("broken", None));
}
