//! Curves on two logarithmic axes, with a spread and a legend.

use std::fmt::Write;

use super::{ABOVE, BELOW, CHART_HEIGHT, Chart, INK, LEFT, LETTER_WIDTH, MUTED, Mark, RIGHT, Svg};
use super::{FAINT, WIDTH};

/// A logarithmic axis in pixels.
struct Axis {
    /// Decimal logarithms.
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Axis {
    fn at(&self, value: f64) -> f64 {
        let share = (value.log10() - self.low) / (self.high - self.low);
        self.from + share.clamp(0.0, 1.0) * (self.to - self.from)
    }
}

/// Draws everything of the chart but its title and unit. Marks of one label are joined in the order
/// of their places; what is not above zero has no place on such axes and is left out.
pub(super) fn draw(svg: &mut Svg, top: f64, chart: &Chart) {
    let marks: Vec<&Mark> =
        chart.marks.iter().filter(|mark| mark.place > 0.0 && mark.value > 0.0).collect();
    let (plot_top, bottom) = (top + ABOVE, top + CHART_HEIGHT - BELOW);
    let bounds = |values: &mut dyn Iterator<Item = f64>| {
        let positive = values.filter(|value| value.is_finite() && *value > 0.0);
        let logarithms = positive.map(f64::log10);
        logarithms.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
            (low.min(value), high.max(value))
        })
    };
    let places = bounds(&mut marks.iter().map(|mark| mark.place));
    let values =
        bounds(&mut marks.iter().flat_map(|mark| [mark.least.max(mark.value * 0.1), mark.most]));
    if marks.is_empty() {
        return;
    }
    let widened = |(low, high): (f64, f64)| if high > low { (low, high) } else { (low, low + 1.0) };
    let (low, high) = widened(places);
    let x = Axis { low, high, from: LEFT + 30.0, to: WIDTH - RIGHT - 40.0 };
    // Whole decades; lines at 1, 2 and 5 times each power of ten.
    let (low, high) = widened((values.0.floor(), values.1.ceil()));
    let y = Axis { low, high, from: bottom, to: plot_top };
    for decade in low as i32..=high as i32 {
        for step in [1.0, 2.0, 5.0] {
            let value = step * 10f64.powi(decade);
            if value.log10() <= high + 1e-9 {
                svg.line([LEFT, y.at(value)], [WIDTH - RIGHT, y.at(value)], FAINT, 1.0);
                svg.text(LEFT - 8.0, y.at(value) + 4.0, "end", MUTED, &format!("{value}"));
            }
        }
    }
    names(svg, &marks, &x, bottom);
    let mut labels: Vec<&str> = Vec::new();
    for mark in &marks {
        if !labels.contains(&mark.label.as_str()) {
            labels.push(&mark.label);
        }
    }
    let mut right = WIDTH - RIGHT;
    for label in labels.iter().rev() {
        let mut curve: Vec<&Mark> =
            marks.iter().copied().filter(|mark| mark.label == *label).collect();
        curve.sort_by(|a, b| a.place.total_cmp(&b.place));
        draw_curve(svg, &curve, &x, &y);
        svg.text(right, top + 34.0, "end", INK, label);
        right -= label.chars().count() as f64 * LETTER_WIDTH + 16.0;
        svg.line([right, top + 30.0], [right + 12.0, top + 30.0], curve[0].colour, 3.0);
        right -= 14.0;
    }
}

fn draw_curve(svg: &mut Svg, curve: &[&Mark], x: &Axis, y: &Axis) {
    for pair in curve.windows(2) {
        let [from, to] = [pair[0], pair[1]].map(|mark| [x.at(mark.place), y.at(mark.value)]);
        svg.line(from, to, curve[0].colour, 2.0);
    }
    for mark in curve {
        let (x, height) = (x.at(mark.place), y.at(mark.value));
        svg.line([x, y.at(mark.least.max(f64::MIN_POSITIVE))], [x, y.at(mark.most)], INK, 1.0);
        let _ = writeln!(
            svg.0,
            "<circle cx=\"{x:.1}\" cy=\"{height:.1}\" r=\"3.5\" fill=\"{}\"/>",
            mark.colour
        );
    }
}

/// Names of the places below the axis, as many as there is room for.
fn names(svg: &mut Svg, marks: &[&Mark], x: &Axis, bottom: f64) {
    let mut places: Vec<(f64, &str)> =
        marks.iter().map(|mark| (x.at(mark.place), mark.name.as_str())).collect();
    places.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut free_from = f64::NEG_INFINITY;
    for (x, name) in places {
        let half = name.chars().count() as f64 * LETTER_WIDTH / 2.0;
        if x - half >= free_from {
            svg.line([x, bottom], [x, bottom + 4.0], INK, 1.0);
            svg.text(x, bottom + 18.0, "middle", INK, name);
            free_from = x + half + LETTER_WIDTH;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Shape, sheet};
    use super::*;

    fn mark(label: &str, place: f64, value: f64) -> Mark {
        Mark {
            name: format!("{place}"),
            place,
            value,
            least: value * 0.9,
            most: value * 1.1,
            label: label.to_owned(),
            colour: "#0072b2",
        }
    }

    fn chart(marks: Vec<Mark>) -> Chart {
        let (title, unit, along) = (String::new(), String::new(), String::new());
        Chart { title, unit, along, marks, shape: Shape::Curves }
    }

    /// Equal factors are equal distances, on both axes.
    #[test]
    fn axes_are_logarithmic() {
        let marks = vec![mark("a", 1e3, 1.0), mark("a", 1e4, 10.0), mark("a", 1e5, 100.0)];
        let svg = sheet(&[], &[chart(marks)]);
        let number = |line: &str, name: &str| {
            let (_, rest) = line.split_once(&format!("{name}=\"")).unwrap();
            rest.split('"').next().unwrap().parse::<f64>().unwrap()
        };
        let circles: Vec<(f64, f64)> = svg
            .lines()
            .filter(|line| line.starts_with("<circle"))
            .map(|line| (number(line, "cx"), number(line, "cy")))
            .collect();
        let [first, second, third] = circles[..] else { panic!("{svg}") };
        assert!(((second.0 - first.0) - (third.0 - second.0)).abs() < 0.2, "{circles:?}");
        assert!(((first.1 - second.1) - (second.1 - third.1)).abs() < 0.2, "{circles:?}");
        assert!(first.1 > third.1, "larger values lie higher");
    }

    #[test]
    fn what_has_no_logarithm_is_left_out() {
        for marks in [vec![], vec![mark("a", 1.0, 0.0), mark("b", 0.0, 1.0), mark("c", 2.0, -1.0)]]
        {
            let svg = sheet(&[], &[chart(marks)]);
            assert!(!svg.contains("NaN") && !svg.contains("inf") && !svg.contains("<circle"));
        }
        let svg = sheet(&[], &[chart(vec![mark("a", 2.0, 3.0), mark("b", 2.0, 3.0)])]);
        assert!(!svg.contains("NaN") && svg.contains(">a</text>") && svg.contains(">b</text>"));
    }
}
