use nvme_bind::doctor::Finding;

use super::findings::{check, failed};
use super::*;
use crate::problem::Problem;

fn finding(route: Route, verdict: Verdict) -> Finding {
    check(route.name(), "a route").about(route.name()).says(verdict, "as it is")
}

#[test]
fn a_route_works_when_one_executor_can_take_it() {
    let findings = [
        finding(Route::Direct, Verdict::Fail),
        finding(Route::Host, Verdict::Fail),
        finding(Route::Host, Verdict::Ok),
        finding(Route::Staged, Verdict::Warn),
        check("gpu", "GPU").says(Verdict::Ok, "no route"),
    ];
    assert_eq!(works(&findings), ["staged", "host"]);
    assert!(works(&[finding(Route::Direct, Verdict::Skip)]).is_empty());
}

#[test]
fn what_would_help_is_shown_with_what_is_wrong() {
    let problem = Problem::new("no way there", "build one");
    let error = anyhow::Error::new(problem).context("walking");
    let finding = failed(check("x", "X"), &error);
    assert_eq!(finding.verdict, Verdict::Fail);
    assert_eq!(finding.found, "walking: no way there");
    assert_eq!(finding.fix.as_deref(), Some("build one"));
    let bare = failed(check("x", "X"), &anyhow::anyhow!("broken"));
    assert_eq!((bare.found.as_str(), bare.fix), ("broken", None));
}
